-- The workers' data for choosing: per role and model one string of rows of equal size, row i - 1 for worker names[i].
--
--   lease taken ──> a row at the end          heartbeat ──> its numbers, in place
--   lease ended ──> the last row moves there  reserved, released ──> its two counters, in place
--   choices     ──> read all workers with two commands and one struct.unpack per pool, once for a batch
--
-- A row is three counters (integers, for BITFIELD) and then doubles:
--
--   tokens, blocks        reserved by gateways
--   chosen                number of the choice that last took this worker: of equals the least recently chosen is next
--   takes                 tokens of the longest sequence it would take now: `capacity`, or 0 while it drains
--   layout                digest of its KV layout
--   kind                  digest of its revision and block size: hashes are comparable only between equal kinds
--   generation            its lease's generation
--   queued                tokens that wait there by its own report
--   token_s               seconds to prefill a token; 0: not measured yet, as all of these
--   near_s, zone_s, far_s seconds to move a token's KV near, within the zone, to another zone
--   used, num_blocks      blocks in use by its own report, and all its blocks
--   block_size, max_num_seqs
--   step_s, sequences     seconds of a step, 0: not measured yet; sequences that run or wait there
--   capacity              tokens of the longest sequence it could ever hold
--   likely                tokens of an answer that it reserves blocks for; 0: for the longest answer
--   stuck                 1: its engine does not finish a step
--   node, domain, zone    digests of its location; domain 0: it is in no NVLink domain
local ROW_BYTES = 192
local COUNTERS_BYTES = 24
-- The offset of the generation after the counters.
local GENERATION_AT = 24
local NUMBERS = '>ddddddddddddddddddddd'
-- The format of a row, and the index of each value after unpacking.
local ROW = 'i8i8i8ddddddddddddddddddddd'
local TOKENS, BLOCKS, CHOSEN, TAKES, LAYOUT, KIND, GENERATION, QUEUED, TOKEN_S, NEAR_S = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local USED, NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, STEP_S, SEQUENCES, CAPACITY, LIKELY = 11, 12, 13, 14, 15, 16, 17, 18
local STUCK, ZONE_S, FAR_S, NODE, DOMAIN, ZONE = 19, 20, 21, 22, 23, 24
local WIDTH = 24
-- Rows per call of struct.unpack, as Lua bounds the number of results.
local ROWS_AT_ONCE = 256

local function digest(text)
  return tonumber(redis.sha1hex(text):sub(1, 12), 16)
end

local function kind_of(revision, block_size)
  return digest(revision .. ' ' .. block_size)
end

local function seconds_each(rate)
  return rate > 0 and 1 / rate or 0
end

-- Returns the packed numbers of a row, from a worker's hash (texts by name).
local function pack_numbers(worker, generation)
  local number = {}
  for _, name in ipairs({'draining', 'block_size', 'num_blocks', 'max_num_seqs', 'max_model_len', 'free_blocks',
    'num_waiting', 'num_running', 'queued_tokens', 'prefill_tokens_per_s', 'transfer_tokens_per_s',
    'zone_transfer_tokens_per_s', 'far_transfer_tokens_per_s', 'step_s', 'likely_tokens'}) do
    number[name] = tonumber(worker[name])
  end
  local capacity = math.min(number.max_model_len, number.num_blocks * number.block_size)
  return struct.pack(NUMBERS, number.draining == 0 and capacity or 0, digest(worker.layout_hash),
    kind_of(worker.revision, worker.block_size), generation, number.queued_tokens,
    seconds_each(number.prefill_tokens_per_s), seconds_each(number.transfer_tokens_per_s),
    number.num_blocks - number.free_blocks, number.num_blocks, number.block_size, number.max_num_seqs,
    number.step_s, number.num_running + number.num_waiting, capacity, number.likely_tokens,
    worker.stuck == '1' and 1 or 0, seconds_each(number.zone_transfer_tokens_per_s),
    seconds_each(number.far_transfer_tokens_per_s), digest(worker.node),
    worker.nvlink_domain == '' and 0 or digest(worker.nvlink_domain), digest(worker.zone))
end

-- Returns id and incarnation of the worker of a row (from 0); nothing if the row is missing or unreadable.
local function named_at(of, row)
  local packed = redis.call('LINDEX', key('names', of), row)
  local read, names = pcall(cmsgpack.unpack, packed or '')
  if read and type(names) == 'table' then return names[1], names[2] end
end

-- True if there is a name for each row, and nothing else.
local function is_even(of)
  return redis.call('STRLEN', key('rows', of)) == ROW_BYTES * redis.call('LLEN', key('names', of))
end

-- Returns '<role>:<model>' and the row (from 0) of a worker; nothing if it has no row, or its hash does not name one.
local function place_of(worker_id)
  local worker = redis.call('HMGET', key('worker', worker_id), 'role', 'model', 'row', 'incarnation')
  local row = whole(worker[3])
  if not (worker[1] and worker[2] and row) then return end
  local of = worker[1] .. ':' .. worker[2]
  local id, incarnation = named_at(of, row)
  if id == worker_id and incarnation == worker[4] then return of, row end
end

-- True if a worker's hash and its row are consistent, as far as scripts read them.
local function is_intact(worker_id)
  local of, row = place_of(worker_id)
  local told = redis.call('HMGET', key('worker', worker_id), 'generation', 'block_batches', 'num_blocks')
  if not (of and is_even(of) and whole(told[1]) and whole(told[2]) and whole(told[3])) then return false end
  local at = row * ROW_BYTES + COUNTERS_BYTES + GENERATION_AT
  local packed = redis.call('GETRANGE', key('rows', of), at, at + 7)
  return struct.unpack('>d', packed) == tonumber(told[1])
end

-- Removes a row (from 0): the last row moves there.
local function cut_row(of, row)
  local rows, names = key('rows', of), key('names', of)
  local packed, last = redis.call('GET', rows), redis.call('RPOP', names)
  local left = #packed - ROW_BYTES
  if row * ROW_BYTES < left then
    redis.call('SETRANGE', rows, row * ROW_BYTES, packed:sub(-ROW_BYTES))
    redis.call('LSET', names, row, last)
    local moved = named_at(of, row)
    if moved and redis.call('HEXISTS', key('worker', moved), 'row') == 1 then redis.call('HSET', key('worker', moved), 'row', row) end
  end
  if left == 0 then redis.call('DEL', rows) else redis.call('SET', rows, redis.call('GETRANGE', rows, 0, left - 1)) end
end

-- Removes all rows and names if their numbers differ: workers get new rows when they renew their leases.
local function even_out(of)
  if is_even(of) then return end
  redis.call('DEL', key('rows', of), key('names', of))
  mended(key('rows', of))
end

-- Removes the rows that are left of a worker whose hash no longer names its row.
local function cut_rows_of(of, worker_id)
  for row = redis.call('LLEN', key('names', of)) - 1, 0, -1 do
    if named_at(of, row) == worker_id then cut_row(of, row) end
  end
end

local function add_row(worker_id, incarnation, of, numbers)
  even_out(of)
  cut_rows_of(of, worker_id)
  local bytes = redis.call('APPEND', key('rows', of), ('\0'):rep(COUNTERS_BYTES) .. numbers)
  redis.call('RPUSH', key('names', of), cmsgpack.pack({worker_id, incarnation}))
  redis.call('HSET', key('worker', worker_id), 'row', bytes / ROW_BYTES - 1)
end

local function write_row(of, row, numbers)
  redis.call('SETRANGE', key('rows', of), row * ROW_BYTES + COUNTERS_BYTES, numbers)
end

local function take_row(worker_id)
  local of, row = place_of(worker_id)
  if not of then return end
  if is_even(of) then cut_row(of, row) else even_out(of) end
end

local COUNTER = {tokens = 0, blocks = 1, chosen = 2}

local function counter(row, part)
  return '#' .. row * ROW_BYTES / 8 + COUNTER[part]
end

local function add_reserved(of, row, part, amount)
  redis.call('BITFIELD', key('rows', of), 'INCRBY', 'i64', counter(row, part), amount)
end

local function reserved(worker_id, part)
  local of, row = place_of(worker_id)
  return not of and 0 or redis.call('BITFIELD', key('rows', of), 'GET', 'i64', counter(row, part))[1]
end

local function unpack_rows(packed, count)
  local values = {struct.unpack('>' .. ROW:rep(math.min(count, ROWS_AT_ONCE)), packed)}
  for row = ROWS_AT_ONCE, count - 1, ROWS_AT_ONCE do
    local more = {struct.unpack('>' .. ROW:rep(math.min(count - row, ROWS_AT_ONCE)), packed, row * ROW_BYTES + 1)}
    for i = 1, #more - 1 do values[row * WIDTH + i] = more[i] end
  end
  return values
end

-- Returns all present rows of a role: row i (from 1) has its values after index (i - 1) * WIDTH. A row without a valid
-- generation was not written by a script, and is removed.
local function read_rows(role, model)
  local of = role .. ':' .. model
  local packed = redis.call('GET', key('rows', of)) or ''
  if #packed ~= ROW_BYTES * redis.call('LLEN', key('names', of)) then
    even_out(of)
    packed = ''
  end
  local count = #packed / ROW_BYTES
  local values = unpack_rows(packed, count)
  for row = 0, count - 1 do
    if not whole(values[row * WIDTH + GENERATION]) then
      mended(key('rows', of))
      cut_row(of, row)
      return read_rows(role, model)
    end
  end
  return {of = of, values = values, count = count, names = {}}
end

-- Returns id and incarnation of row i.
local function who(rows, i)
  local names = rows.names[i]
  if not names then
    names = {named_at(rows.of, i - 1)}
    rows.names[i] = names
  end
  return names[1], names[2]
end
