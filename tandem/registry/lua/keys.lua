-- What every script of the registry starts with: the names of its keys.
--
-- Keys begin with '{namespace}:' and the number of their format (FORMAT in scripts.py), so that releases with different
-- formats can share a namespace without finding each other's workers. Keys that outlast a release have no number:
--
--   bucket: usage:         of a tenant (take.lua)
--   formats                hash: format -> the release that registered with it last
--
-- and all others have one:
--
--   leases                 sorted set: worker id -> when its lease ends (ms, this server's clock)
--   worker:<id>            hash: one incarnation's info and load, and its row
--   rows:<role>:<model>    string: all workers' data for choosing, and what is reserved on each (rows.lua)
--   names:<role>:<model>   list: id and incarnation of the worker of each row
--   links:<id>             set: incarnations of decode workers that this prefill worker has moved a block to
--   held:<id>              hash: tokens:<reservation> or blocks:<reservation> -> amount; sums to what its row says
--   blocks:<id>            set: hashes of the KV blocks this incarnation holds
--   events                 stream: what that set gained and lost, batch by batch; each worker's batches are numbered
--   expected:<period>      hash: block -> generations of the (prefill, decode) pair that is about to hold it
--   clients                sorted set: client -> when its lease ends, and its reservations with it (ms)
--   gateways               hash: client -> a gateway's models and addresses (JSON)
--   keeper                 host:port at which Prometheus reads the kvstore that swept last
--   demands                hash: client -> that gateway's demand, by model (JSON)
--   reservations           sorted set: reservation -> when it expires (ms)
--   reserved:<client>      set: the client's reservations
--   reservation:<id>       hash: tokens -> worker id, blocks -> worker id; a part is here if and only if it is held
--   abandoned:<res>        the reservation was given up, but a call that makes it may still be on its way
--   fenced:<id> <inc>      an incarnation that may not come back
--   refused:<role> <layout>  a worker of this role and KV layout was refused, as it had no possible partner
--   inside:<tenant>        sorted set: requests of a tenant (take.lua)
--   death:<incarnation>    how a worker's process died, and the choices that were being computed (JSON)
--   deaths                 list: the incarnations with a death:<incarnation>, the latest last
--   adapters               hash: name of a LoRA adapter -> its folder, revision and model (JSON)
--   aliases                hash: name -> models that answer to it, and their weights (JSON)
--   on_demand              hash: model -> its status by its launcher (JSON)
--   on_demand_ends         sorted set: model -> when its status expires (ms)
--   on_demand_used         hash: ran:<model> or wanted:<model> -> when it last was, by gateways' reports (ms)
--   epoch                  when this Redis was first filled; changes when it has lost its data (epoch.lua)
--   generation             the latest generation; each new lease gets a higher one than all before
--   turn                   counts choices, so that equal workers take turns
--   sweeps                 counts sweeps, each of which checks one worker's reservations
--   mended                 hash: key -> how often a wrong value was recently deleted there
--   changed                channel: the id of a worker that came, went, drains or has new links
local prefix = KEYS[1]
local namespace, format = prefix:match('^(%b{}:)(%d+):$')

local function key(kind, id)
  return id and prefix .. kind .. ':' .. id or prefix .. kind
end

-- The key that releases of every format share.
local function lasting(kind, id)
  return id and namespace .. kind .. ':' .. id or namespace .. kind
end

-- Returns a count or time in the format that scripts write; nil for any other text.
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

-- Notes that a wrong value, which no script writes, was found at a key and deleted.
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

-- All scripts call Redis by this function: if a key or field has a wrong value, which no script writes, it is deleted
-- and the command is repeated. So a wrong value counts as lost, and fails no call.
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

-- Returns the epoch of this Redis's data; '' if it has none yet.
local function known_epoch()
  local epoch = redis.call('GET', key('epoch'))
  if epoch and not epoch:find('^%d+%.%d+$') then
    redis.call('DEL', key('epoch'))
    mended(key('epoch'))
    epoch = false
  end
  return epoch or ''
end
