-- What every script of the registry starts with: the keys, the time, and the only code that takes things away.
--
--   leases                 sorted set: worker id -> when its lease ends (ms, this server's clock)
--   worker:<id>            hash: one incarnation's info and load
--   table:<model>          what choosing reads of all workers at once (table.lua)
--   changed_in:<model>     set: ids of workers that came, went or told of their load since that was written
--   links:<id>             set: incarnations of decode workers that this prefill worker has moved a block to
--   reserved:<part>        hash: worker id -> sum of the tokens, or blocks, held of it
--   held:<id>              hash: tokens:<reservation> or blocks:<reservation> -> amount; sums to the two counters above
--   blocks:<id>            set: hashes of the KV blocks this incarnation holds
--   events                 stream: what that set gained and lost, batch by batch; each worker's batches are numbered
--   expected:<period>      hash: block -> generations of the (prefill, decode) pair that is about to hold it
--   reservations           sorted set: reservation -> when it expires (ms)
--   reservation:<id>       hash: tokens -> worker id, blocks -> worker id; a part is here if and only if it is held
--   abandoned:<res>        its caller went away while asking for it
--   fenced:<id> <inc>      an incarnation that may not come back
--   stranger:<role> <layout>  a worker of this role and KV layout was refused, for it could have paired with nobody
--   epoch                  when this Redis began to be filled; changes when it lost its memory
--   generation             the latest one; each lease taken gets one of its own, higher than any before
--   turn                   counts choices, so that equals take turns
--   changed                channel: the id of a worker that came, went, drains or has new links
--
-- Every script first forgets what is past its time, so none ever sees a dead worker or counts an expired reservation.
local prefix = KEYS[1]
local FENCE_MS = 3600000
local EXPIRE_BATCH = 256
local EVENTS_KEPT = 4096

local function key(kind, id)
  return id and prefix .. kind .. ':' .. id or prefix .. kind
end

local function announce(worker_id)
  redis.call('PUBLISH', key('changed'), worker_id)
end

-- Batch 0 of a generation says that it has ended and holds nothing any more.
local function tell_blocks(worker_id, generation, number, stored, removed)
  redis.call('XADD', key('events'), 'MAXLEN', '~', EVENTS_KEPT, '*', 'worker', worker_id, 'generation', generation,
    'number', number, 'medium', 'device', 'stored', stored, 'removed', removed)
end

local function forget_if_empty(reservation)
  if redis.call('EXISTS', key('reservation', reservation)) == 0 then
    redis.call('ZREM', key('reservations'), reservation)
  end
end

-- Gives one part ('tokens' or 'blocks') of a reservation back to its worker. Returns 1 if there was one, else 0.
local function drop(reservation, part)
  local worker_id = redis.call('HGET', key('reservation', reservation), part)
  if not worker_id then return 0 end
  local field = part .. ':' .. reservation
  local amount = redis.call('HGET', key('held', worker_id), field)
  redis.call('HDEL', key('held', worker_id), field)
  redis.call('HINCRBY', key('reserved', part), worker_id, -tonumber(amount))
  redis.call('HDEL', key('reservation', reservation), part)
  forget_if_empty(reservation)
  return 1
end

-- Ends a lease and all that hangs on it: what it held for others, and the blocks it was known for.
-- Returns how many blocks were forgotten.
local function retire(worker_id)
  for _, field in ipairs(redis.call('HKEYS', key('held', worker_id))) do
    local part, reservation = field:match('^(%a+):(.*)$')
    redis.call('HDEL', key('reservation', reservation), part)
    forget_if_empty(reservation)
  end
  local blocks = redis.call('SCARD', key('blocks', worker_id))
  local worker = redis.call('HMGET', key('worker', worker_id), 'generation', 'model')
  tell_blocks(worker_id, worker[1] or 0, 0, '', '')
  redis.call('SADD', key('changed_in', worker[2] or ''), worker_id)
  redis.call('HDEL', key('reserved', 'tokens'), worker_id)
  redis.call('HDEL', key('reserved', 'blocks'), worker_id)
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

-- Returns the time (ms) and how many leases, reservations and block locations were past theirs.
local function expire_due()
  local now, blocks = now_ms(), 0
  local dead = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', now)
  for _, worker_id in ipairs(dead) do
    blocks = blocks + retire(worker_id)
  end
  local due = redis.call('ZRANGEBYSCORE', key('reservations'), '-inf', now, 'LIMIT', 0, EXPIRE_BATCH)
  for _, reservation in ipairs(due) do
    drop(reservation, 'tokens')
    drop(reservation, 'blocks')
  end
  return now, #dead, #due, blocks
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
