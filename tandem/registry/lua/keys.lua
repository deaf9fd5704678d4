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
