-- ARGV: worker id, generation, cursor ('0' at first)
-- Returns the number of the worker's last batch, the next cursor ('0' at the end) and some of its blocks' hashes,
-- joined; nothing if this generation has ended. All pages together have every block that was held during the whole
-- read; the batches after the first page's number have all other changes.
local HASH_BYTES = 16
local generation, number = unpack(redis.call('HMGET', key('worker', ARGV[1]), 'generation', 'block_batches'))
if generation ~= ARGV[2] or not whole(number) then return {} end
local found = redis.call('SSCAN', key('blocks', ARGV[1]), ARGV[3], 'COUNT', 1000)
local hashes = {}
for _, hash in ipairs(found[2]) do
  if #hash == HASH_BYTES then hashes[#hashes + 1] = hash end
end
return {number, found[1], table.concat(hashes)}
