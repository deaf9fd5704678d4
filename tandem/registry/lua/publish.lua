-- ARGV: worker id, incarnation, number of removed hashes, the removed hashes, the stored hashes
-- Returns 'stale' if this incarnation holds no lease. The set and the stream of events change as one.
local worker, blocks = key('worker', ARGV[1]), key('blocks', ARGV[1])
if redis.call('HGET', worker, 'incarnation') ~= ARGV[2] or not is_intact(ARGV[1]) then return 'stale' end
local stored = 4 + tonumber(ARGV[3])
in_chunks(4, stored - 1, function(first, last) redis.call('SREM', blocks, unpack(ARGV, first, last)) end)
in_chunks(stored, #ARGV, function(first, last) redis.call('SADD', blocks, unpack(ARGV, first, last)) end)
local removed = table.concat(ARGV, '', 4, stored - 1)
-- A worker cannot hold more blocks than it has and its tiers can keep: if removals were lost, some entries are wrong,
-- and any may be deleted.
local sizes = redis.call('HMGET', worker, 'num_blocks', 'kept_blocks')
local surplus = redis.call('SCARD', blocks) - sizes[1] - (whole(sizes[2]) or 0)
if surplus > 0 then removed = removed .. table.concat(redis.call('SPOP', blocks, surplus)) end
local number = redis.call('HINCRBY', worker, 'block_batches', 1)
tell_blocks(ARGV[1], redis.call('HGET', worker, 'generation'), number, table.concat(ARGV, '', stored), removed)
return 'ok'
