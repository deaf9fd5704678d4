-- ARGV: worker id, incarnation, ttl (ms), 'register' or 'heartbeat', then field, value, … of the worker's hash
-- Returns {'new'}, {'renewed'}, {'stale'}, {'incompatible', another's id, its layout, its role}, or {'taken', address, host
-- and model of the lease's holder, how long (ms) it lasts}. Only a registration can be refused, or replace another
-- incarnation: one at the same address of the same host, which is therefore gone. A heartbeat that finds no lease takes
-- one: so workers come back after Redis has lost its data.
local worker_id, incarnation, ttl, kind = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local worker = key('worker', worker_id)

if redis.call('EXISTS', key('fenced', worker_id .. ' ' .. incarnation)) == 1 then return {'stale'} end

local new = {}
for i = 5, #ARGV, 2 do new[ARGV[i]] = ARGV[i + 1] end

-- Returns the answer to a worker without a possible partner: all live workers of the other role that serve its model
-- and revision have another KV layout. So that a running cluster can change its layout, a refusal is remembered: the
-- next worker of the other role with the same layout is accepted, and then the first one when it registers again.
local REFUSED_MS = 600000
local function incompatible_with()
  local other = nil
  for _, id in ipairs(live_workers()) do
    local live = redis.call('HMGET', key('worker', id), 'role', 'layout_hash', 'model', 'revision', 'draining')
    if live[1] ~= new.role and live[3] == new.model and live[4] == new.revision and live[5] == '0' then
      if live[2] == new.layout_hash then return nil end
      other = {'incompatible', id, live[2], live[1]}
    end
  end
  if not other or redis.call('EXISTS', key('refused', other[4] .. ' ' .. new.layout_hash)) == 1 then return nil end
  redis.call('SET', key('refused', new.role .. ' ' .. new.layout_hash), worker_id, 'PX', REFUSED_MS)
  return other
end

-- An unreadable entry of a worker is removed: the worker registers again.
if redis.call('EXISTS', worker) == 1 and not is_intact(worker_id) then
  mended(worker)
  retire(worker_id)
end
local current = redis.call('HGET', worker, 'incarnation')
local function taken_by()
  local at = redis.call('HMGET', worker, 'grpc_address', 'host', 'model')
  if at[1] == new.grpc_address and at[2] == new.host then return nil end
  return {'taken', at[1], at[2], at[3], (redis.call('ZSCORE', key('leases'), worker_id) or now) - now}
end
if kind == 'register' and current ~= incarnation then
  local taken = current and taken_by()
  if taken then return taken end
  local other = incompatible_with()
  if other then return other end
end
if current and current ~= incarnation then
  if kind ~= 'register' then return {'stale'} end
  redis.call('SET', key('fenced', worker_id .. ' ' .. current), '', 'PX', FENCE_MS)
  retire(worker_id)
end

local function write_links(text)
  local links = cjson.decode(text)
  redis.call('DEL', key('links', worker_id))
  in_chunks(1, #links, function(first, last)
    redis.call('SADD', key('links', worker_id), unpack(links, first, last))
  end)
end

-- The first worker of a release with a new format takes over the adapters of the release before it.
local function inherit_adapters()
  for number = format - 1, FIRST_FORMAT, -1 do
    if redis.call('COPY', keys_of(number) .. 'adapters', key('adapters')) == 1 then return end
  end
end

local before = redis.call('HMGET', worker, 'draining', 'linked', 'stuck')
redis.call('HSET', worker, unpack(ARGV, 5))
redis.call('ZADD', key('leases'), now + ttl, worker_id)
write_links(new.linked)
if current == incarnation then
  local of, row = place_of(worker_id)
  write_row(of, row, pack_numbers(new, redis.call('HGET', worker, 'generation')))
  if before[1] ~= new.draining or before[2] ~= new.linked or before[3] ~= new.stuck then announce(worker_id) end
  return {'renewed'}
end
local time = redis.call('TIME')
local generation = math.max(time[1] * 1000000 + time[2], (whole(redis.call('GET', key('generation'))) or 0) + 1)
local text = string.format('%.0f', generation)
redis.call('SET', key('generation'), text)
redis.call('HSET', worker, 'generation', text, 'block_batches', 0)
add_row(worker_id, incarnation, new.role .. ':' .. new.model, pack_numbers(new, generation))
known_epoch()
if redis.call('SET', key('epoch'), table.concat(time, '.'), 'NX') then inherit_adapters() end
redis.call('HSET', lasting('formats'), format, RELEASE)
announce(worker_id)
return {'new'}
