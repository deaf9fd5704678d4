-- What a request costs on each worker: seconds of waiting, its own and others'. select.lua weighs these.
--
--   prefill p    queue + own reading                          work waiting there, and the prompt less p's hit
--   move p -> d  what d lacks / p's rate of moving
--   decode d     how full it is, in steps of its own length
--   alone on d   queue + own reading on d, and how it halts every sequence that runs there
--
-- Rates are what workers measured; one that has measured nothing counts as a nominal one.
local NOMINAL_TOKEN_S = 1 / 8192
-- Also the room that a second copy of the token takes from other prefixes.
local NOMINAL_TRANSFER_S = 1 / 32768
local NOMINAL_STEP_S = 1 / 64
-- A full worker writes each token of an answer later: counted for so many of them.
local ANSWER_STEPS = 64
local NO_ROOM_NOW = 8
-- Work also delays whoever comes next, and a prefix read twice takes another one's room: a hit is worth some queueing.
-- On Mooncake's trace a larger weight finds hardly more hits and a smaller one makes first tokens no faster.
local OWN_WORK = 8
-- Two workers to call instead of one.
local TWO_CALLS_S = 0.002

local function rate_s(per_s, nominal)
  return per_s > 0 and 1 / per_s or nominal
end

-- After reading a worker, and after each reservation: work it is known to have. Reserved and reported tell of the same
-- work, one sooner and one also after Redis lost its memory: take the larger.
local function settle(worker)
  worker.queue = math.max(worker.reserved_tokens, worker.queued_tokens)
  worker.used = math.max(worker.reserved_blocks, worker.num_blocks - worker.free_blocks)
end

-- Returns the workers that have a lease and serve `model` as {prefill = workers, decode = workers, roles = role of each
-- generation}.
local function read_pool(model, reserved)
  local pool, rows = {prefill = {}, decode = {}, roles = {}}, redis.call('HGETALL', key('pool', model))
  for i = 1, #rows, 2 do
    local worker = cmsgpack.unpack(rows[i + 1])
    worker.id = rows[i]
    worker.capacity = math.min(worker.max_model_len, worker.num_blocks * worker.block_size)
    worker.token_s = rate_s(worker.prefill_tokens_per_s, NOMINAL_TOKEN_S)
    worker.transfer_s = rate_s(worker.transfer_tokens_per_s, NOMINAL_TRANSFER_S)
    worker.step = worker.step_s > 0 and worker.step_s or NOMINAL_STEP_S
    worker.full_s = worker.step * ANSWER_STEPS
    worker.sequences = worker.num_running + worker.num_waiting
    worker.reserved_tokens = tonumber(reserved['tokens:' .. worker.id] or 0)
    worker.reserved_blocks = tonumber(reserved['blocks:' .. worker.id] or 0)
    settle(worker)
    if worker.role == 'prefill' then
      pool.fastest_transfer_s = math.min(pool.fastest_transfer_s or math.huge, worker.transfer_s)
    end
    pool.roles[worker.generation] = worker.role
    table.insert(pool[worker.role], worker)
  end
  return pool
end

-- Sets `hit` and `tokens` to read, of this request.
local function count_hit(worker, request)
  local hit = request.hits[worker.generation]
  if hit and worker.revision == request.revision and worker.block_size == request.block_size then
    worker.hit = hit * worker.block_size
  else
    worker.hit = 0
  end
  worker.tokens = math.max(request.prompt_tokens - worker.hit, 1)
end

local function weigh_prefill(worker, request)
  count_hit(worker, request)
  worker.cost = (worker.queue + OWN_WORK * worker.tokens) * worker.token_s
end

-- Sets `cost` of writing, whoever reads, and `missing` to move.
local function weigh_decode(worker, request)
  count_hit(worker, request)
  worker.missing = request.prompt_tokens - worker.hit
  worker.blocks = math.ceil((request.prompt_tokens + request.new_tokens) / worker.block_size)
  local used = worker.used + worker.blocks
  worker.cost = (used / worker.num_blocks + worker.sequences / worker.max_num_seqs) * worker.full_s
  if used > worker.num_blocks then worker.cost = worker.cost + NO_ROOM_NOW end
end

local function cost_of_pair(prefill, decode)
  return prefill.cost + (decode.cost + decode.missing * prefill.transfer_s)
end

-- A decode worker that has read nothing yet is taken to read as fast as the prefill worker it is compared with. Reading
-- halts each sequence that runs there, and this one when it does: a halt counts by how long it is beside a step, for a
-- short one is hardly seen and a long one breaks what a reader of tokens expects.
local function cost_alone(decode, compared_with)
  local unknown = decode.prefill_tokens_per_s == 0 and compared_with
  local token_s = unknown and compared_with.token_s or decode.token_s
  local halt = (decode.queue + decode.tokens) * token_s
  local halts = (1 + decode.sequences) * halt * halt / decode.step
  return decode.cost + (decode.queue + OWN_WORK * decode.tokens) * token_s + halts
end
