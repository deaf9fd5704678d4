-- What every script of the registry starts with: the names of its keys.
--
-- Keys begin with '{namespace}:' and the number of their format (FORMAT in scripts.py): releases that would misread each
-- other share a namespace, and neither finds the other's workers. What lasts longer than a release has no number:
--
--   bucket: usage:         of a tenant (take.lua)
--   formats                hash: format -> the release that registered with it last
--
-- and all others have one:
--
--   leases                 sorted set: worker id -> when its lease ends (ms, this server's clock)
--   worker:<id>            hash: one incarnation's info and load, and its row
--   rows:<role>:<model>    string: what choosing reads of all workers at once, and what is reserved of each (rows.lua)
--   names:<role>:<model>   list: id and incarnation of the worker of each row
--   links:<id>             set: incarnations of decode workers that this prefill worker has moved a block to
--   held:<id>              hash: tokens:<reservation> or blocks:<reservation> -> amount; sums to what its row says
--   blocks:<id>            set: hashes of the KV blocks this incarnation holds
--   events                 stream: what that set gained and lost, batch by batch; each worker's batches are numbered
--   expected:<period>      hash: block -> generations of the (prefill, decode) pair that is about to hold it
--   clients                sorted set: client -> when its own lease ends, and with it what it has reserved (ms)
--   gateways               hash: client -> of a gateway, its models and addresses (JSON)
--   keeper                 host:port at which Prometheus reads the kvstore that swept last
--   demands                hash: client -> what that gateway has to do, by model (JSON)
--   reservations           sorted set: reservation -> when it expires (ms)
--   reserved:<client>      set: the client's reservations
--   reservation:<id>       hash: tokens -> worker id, blocks -> worker id; a part is here if and only if it is held
--   abandoned:<res>        it has been released, or was never made, while what asks for it may still be on its way
--   fenced:<id> <inc>      an incarnation that may not come back
--   refused:<role> <layout>  a worker of this role and KV layout was refused: none could have paired with it
--   inside:<tenant>        sorted set: requests of a tenant (take.lua)
--   death:<incarnation>    how a worker's process died, and who was computed then (JSON)
--   deaths                 list: incarnations of those, the latest last
--   adapters               hash: name of a LoRA adapter -> its folder, revision and model (JSON)
--   aliases                hash: name -> models that answer to it, and their weights (JSON)
--   on_demand              hash: model -> what its launcher says of it (JSON)
--   on_demand_ends         sorted set: model -> how long that holds (ms)
--   on_demand_used         hash: ran:<model> or wanted:<model> -> when gateways last said so (ms)
--   epoch                  when this Redis began to be filled; changes when it lost its memory (epoch.lua)
--   generation             the latest one; each lease taken gets one of its own, higher than any before
--   turn                   counts choices, so that equals take turns
--   sweeps                 counts sweeps, each of which looks at what one worker holds
--   mended                 hash: key that had a wrong value -> how often that was taken away, of late
--   changed                channel: the id of a worker that came, went, drains or has new links
local prefix = KEYS[1]
local namespace, format = prefix:match('^(%b{}:)(%d+):$')

local function key(kind, id)
  return id and prefix .. kind .. ':' .. id or prefix .. kind
end

-- Releases of every format have this one.
local function lasting(kind, id)
  return id and namespace .. kind .. ':' .. id or namespace .. kind
end

-- Returns a count, or time, as scripts write them; nil for any other text.
local function whole(text)
  local number = tonumber(text or '')
  return number and number >= 0 and number < 2^53 and number % 1 == 0 and number or nil
end

local function finite(text)
  local number = tonumber(text or '')
  return number and math.abs(number) < math.huge and number or nil
end

local MOST_MENDED, MENDED_KEPT_MS = 64, 3600000
local store = redis

-- Notes that a value which no script writes was found there, and taken away.
local function mended(name)
  local notes, field = key('mended'), name:sub(#namespace + 1):gsub('^%d+:', ''):sub(1, 80)
  if not pcall(store.call, 'HLEN', notes) then store.call('DEL', notes) end
  if store.call('HLEN', notes) >= MOST_MENDED and store.call('HEXISTS', notes, field) == 0 then field = 'others' end
  if not pcall(store.call, 'HINCRBY', notes, field, 1) then store.call('HSET', notes, field, 1) end
  store.call('PEXPIRE', notes, MENDED_KEPT_MS)
end

local WRONG_VALUE = {'WRONGTYPE', 'hash value is not', 'would overflow', 'NaN or Infinity', 'exhausted', 'allowed size'}

local function is_wrong_value(command, text)
  if command:find('^INCR') and text:find('is not an integer', 1, true) then return true end
  for _, part in ipairs(WRONG_VALUE) do
    if text:find(part, 1, true) then return true end
  end
  return false
end

-- Scripts of the registry call Redis by this one: a key, or a field, that has a value which none of them writes is taken
-- away, and the command is repeated. So a wrong value is as one that Redis has lost, and fails no call.
local redis = setmetatable({}, {__index = store})
function redis.call(...)
  local ran, answer = pcall(store.call, ...)
  if ran then return answer end
  local command, name, field = ...
  if not is_wrong_value(command, type(answer) == 'table' and answer.err or answer) then error(answer, 0) end
  if command:find('^HINCR') and store.call('TYPE', name).ok == 'hash' then
    store.call('HDEL', name, field)
  else
    store.call('UNLINK', name)
  end
  mended(name)
  return store.call(...)
end

-- Returns which memory this Redis has; '' where it has none yet.
local function known_epoch()
  local epoch = redis.call('GET', key('epoch'))
  if epoch and not epoch:find('^%d+%.%d+$') then
    redis.call('DEL', key('epoch'))
    mended(key('epoch'))
    epoch = false
  end
  return epoch or ''
end
