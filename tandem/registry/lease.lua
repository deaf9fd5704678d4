-- ARGV: worker id, incarnation, ttl (ms), 'register' or 'heartbeat', then field, value, … of the worker's hash
-- Returns 'new', 'renewed' or 'stale'. Only a registration replaces another incarnation; a heartbeat that finds no
-- lease at all takes one, which is how workers come back after Redis lost its memory.
local worker_id, incarnation, ttl, kind = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now = expire_due()
local worker = key('worker', worker_id)

if redis.call('EXISTS', key('fenced', worker_id .. ' ' .. incarnation)) == 1 then return 'stale' end
local current = redis.call('HGET', worker, 'incarnation')
if current and current ~= incarnation then
  if kind ~= 'register' then return 'stale' end
  redis.call('SET', key('fenced', worker_id .. ' ' .. current), '', 'PX', FENCE_MS)
  retire(worker_id)
end

local function write_links(before, after)
  if before == after then return end
  local links = cjson.decode(after)
  redis.call('DEL', key('links', worker_id))
  in_chunks(1, #links, function(first, last)
    redis.call('SADD', key('links', worker_id), unpack(links, first, last))
  end)
end

local before = redis.call('HMGET', worker, 'draining', 'linked')
redis.call('HSET', worker, unpack(ARGV, 5))
redis.call('ZADD', key('leases'), now + ttl, worker_id)
local after = redis.call('HMGET', worker, 'draining', 'linked', 'model')
write_links(before[2], after[2])
redis.call('SADD', key('changed_in', after[3]), worker_id)
if current == incarnation then
  if before[1] ~= after[1] or before[2] ~= after[2] then announce(worker_id) end
  return 'renewed'
end
local time = redis.call('TIME')
local generation = math.max(time[1] * 1000000 + time[2], tonumber(redis.call('GET', key('generation')) or 0) + 1)
generation = string.format('%.0f', generation)
redis.call('SET', key('generation'), generation)
redis.call('HSET', worker, 'generation', generation, 'block_batches', 0)
redis.call('SET', key('epoch'), table.concat(time, '.'), 'NX')
announce(worker_id)
return 'new'
