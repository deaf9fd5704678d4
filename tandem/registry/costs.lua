-- What a request costs on each worker: seconds of waiting, its own and others'. select.lua weighs these.
--
--   prefill p    queue + own reading                          work waiting there, and the prompt less p's hit
--   move p -> d  what d lacks / p's rate of moving
--   decode d     how full it is, in steps of its own length
--   alone on d   queue + own reading on d, and how it halts every sequence that runs there
--
-- Reserved and reported tell of the same work, one sooner and one also after Redis lost its memory: the larger counts.
local NO_ROOM_NOW = 8
-- A full worker writes each token of an answer later: counted for so many of them.
local ANSWER_STEPS = 64
-- Work also delays whoever comes next, and a prefix read twice takes another one's room: a hit is worth some queueing.
-- On Mooncake's trace a larger weight finds hardly more hits and a smaller one makes first tokens no faster, with the
-- readers a third busy or nearly full.
local OWN_WORK = 16
-- Two workers to call instead of one.
local TWO_CALLS_S = 0.002
local max, ceil, huge, read = math.max, math.ceil, math.huge, struct.unpack

local function excludes(request, rows, i)
  if not request.excluded then return false end
  local id, incarnation = who(rows, i)
  return request.excluded[id] or request.excluded[incarnation]
end

local function size_on(role, request)
  return request.prompt_tokens + (role == 'decode' and request.new_tokens or 0)
end

local function hit_of(request, kind, generation)
  return kind == request.kind and (request.hits[generation] or 0) * request.block_size or 0
end

-- Sets rows.fastest: the least of transfer_s; rows.usual: the mean of token_s; rows.known: the best hit (blocks).
local function survey_prefills(rows, hits)
  local fastest, sum, known, packed = huge, 0, 0, rows.packed
  for at = SURVEYED_AT, #packed, ROW_BYTES do
    local generation, token_s, transfer_s = read(SURVEYED, packed, at)
    if transfer_s < fastest then fastest = transfer_s end
    sum = sum + token_s
    known = max(known, hits[generation] or 0)
  end
  rows.fastest, rows.usual, rows.known = rows.count > 0 and fastest or 0, sum / max(rows.count, 1), known
end

-- Returns what reading the prompt costs on row p, infinite where that cannot be; its layout, token_s and transfer_s.
-- What is lost with a hit counts alike wherever that is: else whoever once seemed a little slower would get hardly
-- anything.
local function reading(rows, p, request)
  local reserved, _, takes, layout, kind, generation, queued, token_s, transfer_s =
    read(READER, rows.packed, (p - 1) * ROW_BYTES + 1)
  local prompt, cost = request.prompt_tokens, huge
  if prompt <= takes and not excludes(request, rows, p) then
    local tokens = max(prompt - hit_of(request, kind, generation), 1)
    cost = (max(reserved, queued) + tokens) * token_s + tokens * ((OWN_WORK - 1) * rows.usual)
  end
  return cost, layout, token_s, transfer_s
end

-- Sets rows.cost: of writing the answer, whoever reads, infinite where that cannot be; rows.missing: tokens to be moved
-- there; rows.layout; rows.least: no row costs less than this with what it lacks, moved at `fastest` seconds a token.
-- Returns how many rows can take it.
local function weigh_decodes(rows, request, fastest)
  local costs, missing, layouts, least, count = {}, {}, {}, huge, 0
  local size, prompt, packed = size_on('decode', request), request.prompt_tokens, rows.packed
  for d = 1, rows.count do
    local _, reserved, takes, layout, kind, generation, _, _, _, used, num_blocks, block_size, max_num_seqs, step_s,
      sequences = read(WRITER, packed, (d - 1) * ROW_BYTES + 1)
    local cost, lacking = huge, prompt - hit_of(request, kind, generation)
    if size <= takes and not excludes(request, rows, d) then
      local blocks, full_s = max(reserved, used) + ceil(size / block_size), ANSWER_STEPS * step_s
      local room = blocks > num_blocks and NO_ROOM_NOW or 0
      cost = blocks / num_blocks * full_s + sequences / max_num_seqs * full_s + room
      if cost + lacking * fastest < least then least = cost + lacking * fastest end
      count = count + 1
    end
    costs[d], missing[d], layouts[d] = cost, lacking, layout
  end
  rows.cost, rows.missing, rows.layout, rows.least = costs, missing, layouts, least
  return count
end

-- What d's own reading adds to its cost. One that has read nothing yet is taken to read as fast as the prefill worker
-- that it is compared with. Reading halts each sequence that runs there, and this one when it does: a halt counts by how
-- long it is beside a step, for a short one is hardly seen and a long one breaks what a reader of tokens expects.
local function reading_alone(rows, d, compared_token_s)
  local reserved, _, _, _, _, _, queued, token_s, _, _, _, _, _, step_s, sequences, unmeasured =
    read(WRITER, rows.packed, (d - 1) * ROW_BYTES + 1)
  if unmeasured == 1 then token_s = compared_token_s or token_s end
  local queue, tokens = max(reserved, queued), max(rows.missing[d], 1)
  local halt = (queue + tokens) * token_s
  return (queue + OWN_WORK * tokens) * token_s + (1 + sequences) * halt * halt / step_s
end
