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

local TEXTS = {'role', 'generation', 'incarnation', 'layout_hash', 'revision'}
local NUMBERS = {'draining', 'block_size', 'num_blocks', 'max_num_seqs', 'max_model_len', 'free_blocks', 'num_waiting',
  'num_running', 'queued_tokens', 'prefill_tokens_per_s', 'transfer_tokens_per_s', 'step_s'}

-- Writes what choosing reads: one value instead of twenty, and links to be looked up one by one.
local function put_into_pool(links_changed)
  local links = cjson.decode(redis.call('HGET', worker, 'linked'))
  if links_changed then
    redis.call('DEL', key('links', worker_id))
    in_chunks(1, #links, function(first, last)
      redis.call('SADD', key('links', worker_id), unpack(links, first, last))
    end)
  end
  local packed = {num_links = #links}
  for i, value in ipairs(redis.call('HMGET', worker, unpack(TEXTS))) do packed[TEXTS[i]] = value end
  for i, value in ipairs(redis.call('HMGET', worker, unpack(NUMBERS))) do packed[NUMBERS[i]] = tonumber(value) end
  redis.call('HSET', key('pool', redis.call('HGET', worker, 'model')), worker_id, cmsgpack.pack(packed))
end

local before = redis.call('HMGET', worker, 'draining', 'linked')
redis.call('HSET', worker, unpack(ARGV, 5))
redis.call('ZADD', key('leases'), now + ttl, worker_id)
local after = redis.call('HMGET', worker, 'draining', 'linked')
if current == incarnation then
  put_into_pool(before[2] ~= after[2])
  if before[1] ~= after[1] or before[2] ~= after[2] then announce(worker_id) end
  return 'renewed'
end
local time = redis.call('TIME')
local generation = math.max(time[1] * 1000000 + time[2], tonumber(redis.call('GET', key('generation')) or 0) + 1)
generation = string.format('%.0f', generation)
redis.call('SET', key('generation'), generation)
redis.call('HSET', worker, 'generation', generation, 'block_batches', 0)
redis.call('SET', key('epoch'), table.concat(time, '.'), 'NX')
put_into_pool(true)
announce(worker_id)
return 'new'
