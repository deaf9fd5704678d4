-- The time, and the only code that releases and expires.
--
-- Every script first deletes what has expired, so no script ever sees a dead worker. A call that finds very many
-- expired reservations deletes a part, and later calls the rest.
local FENCE_MS = 3600000
local ABANDONED_MS = 120000
local EXPIRE_BATCH = 256
local EVENTS_KEPT = 4096

local function announce(worker_id)
  redis.call('PUBLISH', key('changed'), worker_id)
end

-- Batch 0 of a generation means that it has ended and holds nothing any more.
local function tell_blocks(worker_id, generation, number, stored, removed)
  redis.call('XADD', key('events'), 'MAXLEN', '~', EVENTS_KEPT, '*', 'worker', worker_id, 'generation', generation,
    'number', number, 'medium', 'device', 'stored', stored, 'removed', removed)
end

-- Reservations are named <request>/<client>/<number>.
local function all_of_client(reservation)
  return key('reserved', reservation:match('([^/]*)/%d+$') or '')
end

local function forget_if_empty(reservation)
  if redis.call('EXISTS', key('reservation', reservation)) == 0 then
    redis.call('ZREM', key('reservations'), reservation)
    redis.call('SREM', all_of_client(reservation), reservation)
  end
end

-- Returns the sum of a part ('tokens' or 'blocks') that is held on a worker.
local function held_by(worker_id, part)
  local sum, held = 0, redis.call('HGETALL', key('held', worker_id))
  for i = 1, #held, 2 do
    if held[i]:match('^(%a+):') == part then sum = sum + (whole(held[i + 1]) or 0) end
  end
  return sum
end

-- Releases one part ('tokens' or 'blocks') of a reservation. Returns 1 if there was one, else 0.
local function drop(reservation, part)
  local worker_id = redis.call('HGET', key('reservation', reservation), part)
  if not worker_id then return 0 end
  local field = part .. ':' .. reservation
  local amount = whole(redis.call('HGET', key('held', worker_id), field))
  redis.call('HDEL', key('held', worker_id), field)
  local of, row = place_of(worker_id)
  if of then add_reserved(of, row, part, amount and -amount or held_by(worker_id, part) - reserved(worker_id, part)) end
  redis.call('HDEL', key('reservation', reservation), part)
  forget_if_empty(reservation)
  return 1
end

-- Marks a reservation such that a late call that makes it, on an old connection, does nothing.
local function abandon(name)
  redis.call('SET', key('abandoned', name), '', 'PX', ABANDONED_MS)
end

-- Releases the reservations in ARGV from first to last: reservation, 'tokens' | 'all', and so on in pairs. Returns for
-- each the number of parts released.
local function drop_each(first, last)
  local dropped = {}
  for i = first, last, 2 do
    local count = drop(ARGV[i], 'tokens')
    if ARGV[i + 1] == 'all' then count = count + drop(ARGV[i], 'blocks') end
    dropped[#dropped + 1] = count
  end
  return dropped
end

-- Ends a lease and all that depends on it: the reservations on its worker, and the worker's known blocks.
-- Returns the number of block locations deleted.
local function retire(worker_id)
  for _, field in ipairs(redis.call('HKEYS', key('held', worker_id))) do
    local part, reservation = field:match('^(%a+):(.*)$')
    if part then
      redis.call('HDEL', key('reservation', reservation), part)
      forget_if_empty(reservation)
    end
  end
  local blocks = redis.call('SCARD', key('blocks', worker_id))
  tell_blocks(worker_id, whole(redis.call('HGET', key('worker', worker_id), 'generation')) or 0, 0, '', '')
  take_row(worker_id)
  redis.call('UNLINK', key('worker', worker_id), key('held', worker_id), key('blocks', worker_id),
    key('links', worker_id))
  redis.call('ZREM', key('leases'), worker_id)
  announce(worker_id)
  return blocks
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function drop_whole(reservations)
  for _, reservation in ipairs(reservations) do
    drop(reservation, 'tokens')
    drop(reservation, 'blocks')
    redis.call('UNLINK', key('reservation', reservation))
    forget_if_empty(reservation)
  end
  return #reservations
end

-- Releases up to `most` reservations of a dead client; the next calls release the rest. Returns their number.
local function drop_some_of(client, most)
  redis.call('HDEL', key('gateways'), client)
  local found = redis.call('SRANDMEMBER', key('reserved', client), most)
  if #found < most then redis.call('ZREM', key('clients'), client) end
  return drop_whole(found)
end

-- Returns the time (ms) and the numbers of leases, reservations and block locations that had expired.
local function expire_due()
  local now, blocks = now_ms(), 0
  local dead = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', now)
  for _, worker_id in ipairs(dead) do
    blocks = blocks + retire(worker_id)
  end
  local room = EXPIRE_BATCH
  for _, client in ipairs(redis.call('ZRANGEBYSCORE', key('clients'), '-inf', now, 'LIMIT', 0, EXPIRE_BATCH)) do
    if room > 0 then room = room - drop_some_of(client, room) end
  end
  room = room - drop_whole(redis.call('ZRANGEBYSCORE', key('reservations'), '-inf', now, 'LIMIT', 0, room))
  return now, #dead, EXPIRE_BATCH - room, blocks
end

local function live_workers()
  local ids = redis.call('ZRANGE', key('leases'), 0, -1)
  table.sort(ids)
  return ids
end

-- Calls visit(first, last) for ranges that a single Redis command can take as arguments.
local function in_chunks(first, last, visit)
  for start = first, last, 1000 do
    if visit(start, math.min(start + 999, last)) == false then return end
  end
end

local now, num_leases_ended, num_reservations_ended, num_blocks_forgotten = expire_due()
