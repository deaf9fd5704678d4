-- What choosing knows of a model's workers: two tables, prefill and decode, by columns, kept packed in one string.
--
--   heartbeat, lease taken or ended ──> changed_in:<model> gets the worker's id: that is all it costs them
--   choice    ──> unpacks table:<model>; takes the changed workers out, puts those alive in again, packs it anew
--
-- So a choice reads every worker with a handful of commands; unpacking columns takes Redis less than a microsecond for
-- each worker. Row i of a role is worker id[i]. Columns, of those roles that need them:
--
--   id, generation, incarnation, layout_hash, revision    texts
--   draining, block_size, num_links                       as the worker tells them; draining as 0 or 1
--   capacity                                              tokens of the longest sequence it could hold
--   queued, used, num_blocks                              tokens it says wait for it; blocks it says are in use, of all
--   token_s, transfer_s                                   seconds to read a token, to move one
--   unmeasured                                            it has read nothing yet: token_s is nominal
--   step_s, full_s                                        seconds of a step; what a full worker adds to an answer
--   sequences, sequences_s                                that run or wait there; what they add to an answer
--   reserved_tokens, reserved_blocks                      by gateways: not packed, read each time
local now = expire_due()

local NOMINAL_TOKEN_S = 1 / 8192
-- Also the room that a second copy of the token takes from other prefixes.
local NOMINAL_TRANSFER_S = 1 / 32768
local NOMINAL_STEP_S = 1 / 64
-- A full worker writes each token of an answer later: counted for so many of them.
local ANSWER_STEPS = 64

local COLUMNS = {
  prefill = {'id', 'generation', 'incarnation', 'layout_hash', 'revision', 'draining', 'block_size', 'capacity', 'queued',
    'token_s', 'num_links', 'transfer_s'},
  decode = {'id', 'generation', 'incarnation', 'layout_hash', 'revision', 'draining', 'block_size', 'capacity', 'queued',
    'token_s', 'unmeasured', 'used', 'num_blocks', 'step_s', 'full_s', 'sequences', 'sequences_s'},
}
local TEXTS_READ = {'role', 'generation', 'incarnation', 'layout_hash', 'revision'}
local NUMBERS_READ = {'draining', 'block_size', 'num_blocks', 'max_num_seqs', 'max_model_len', 'free_blocks',
  'num_waiting', 'num_running', 'queued_tokens', 'prefill_tokens_per_s', 'transfer_tokens_per_s', 'step_s'}

local function read_worker(worker_id)
  local worker = {id = worker_id}
  local texts = redis.call('HMGET', key('worker', worker_id), unpack(TEXTS_READ))
  local numbers = redis.call('HMGET', key('worker', worker_id), unpack(NUMBERS_READ))
  for i, name in ipairs(TEXTS_READ) do worker[name] = texts[i] end
  for i, name in ipairs(NUMBERS_READ) do worker[name] = tonumber(numbers[i]) end
  return worker
end

local function row_of(worker)
  local rate, moved = worker.prefill_tokens_per_s, worker.transfer_tokens_per_s
  local step_s = worker.step_s > 0 and worker.step_s or NOMINAL_STEP_S
  local full_s = ANSWER_STEPS * step_s
  local sequences = worker.num_running + worker.num_waiting
  return {
    id = worker.id, generation = worker.generation, incarnation = worker.incarnation,
    layout_hash = worker.layout_hash, revision = worker.revision, draining = worker.draining,
    num_links = redis.call('SCARD', key('links', worker.id)),
    block_size = worker.block_size, num_blocks = worker.num_blocks,
    capacity = math.min(worker.max_model_len, worker.num_blocks * worker.block_size),
    queued = worker.queued_tokens, used = worker.num_blocks - worker.free_blocks,
    token_s = rate > 0 and 1 / rate or NOMINAL_TOKEN_S, unmeasured = rate > 0 and 0 or 1,
    transfer_s = moved > 0 and 1 / moved or NOMINAL_TRANSFER_S,
    step_s = step_s, full_s = full_s, sequences = sequences, sequences_s = sequences / worker.max_num_seqs * full_s,
  }
end

local function take_out(rows, role, worker_id)
  for i, id in ipairs(rows.id) do
    if id == worker_id then
      local last = #rows.id
      for _, name in ipairs(COLUMNS[role]) do
        rows[name][i] = rows[name][last]
        rows[name][last] = nil
      end
      return
    end
  end
end

local function put_in(rows, role, row)
  for _, name in ipairs(COLUMNS[role]) do table.insert(rows[name], row[name]) end
end

local function empty_table()
  local workers = {prefill = {}, decode = {}}
  for role, rows in pairs(workers) do
    for _, name in ipairs(COLUMNS[role]) do rows[name] = {} end
  end
  return workers
end

-- Returns worker id -> amount; nothing where nothing ever was.
local function read_reserved(part)
  local flat, amounts = redis.call('HGETALL', key('reserved', part)), {}
  for i = 1, #flat, 2 do amounts[flat[i]] = tonumber(flat[i + 1]) end
  return amounts
end

-- Returns {prefill = rows, decode = rows}. Both have `row` too: generation -> row number; and the prefill workers
-- `fastest`: the least of transfer_s; `usual`: the mean of token_s.
local function read_table(model)
  local packed, changed = redis.call('GET', key('table', model)), redis.call('SMEMBERS', key('changed_in', model))
  local workers = packed and cmsgpack.unpack(packed) or empty_table()
  for _, worker_id in ipairs(changed) do
    for role, rows in pairs(workers) do take_out(rows, role, worker_id) end
    local worker = read_worker(worker_id)
    if worker.role then put_in(workers[worker.role], worker.role, row_of(worker)) end
  end
  if #changed > 0 then
    redis.call('SET', key('table', model), cmsgpack.pack(workers))
    redis.call('DEL', key('changed_in', model))
  end
  local fastest = math.huge
  for _, transfer_s in ipairs(workers.prefill.transfer_s) do fastest = math.min(fastest, transfer_s) end
  workers.prefill.fastest = #workers.prefill.id > 0 and fastest or 0
  local sum = 0
  for _, token_s in ipairs(workers.prefill.token_s) do sum = sum + token_s end
  workers.prefill.usual = sum / math.max(#workers.prefill.id, 1)
  local tokens, blocks = read_reserved('tokens'), read_reserved('blocks')
  for _, rows in pairs(workers) do
    rows.row, rows.links, rows.reserved_tokens, rows.reserved_blocks = {}, {}, {}, {}
    for i, id in ipairs(rows.id) do
      rows.row[rows.generation[i]] = i
      rows.reserved_tokens[i], rows.reserved_blocks[i] = tokens[id] or 0, blocks[id] or 0
    end
  end
  return workers
end
