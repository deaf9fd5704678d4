-- What a request costs on each worker: seconds of waiting, its own and others'. select.lua weighs these.
--
--   prefill p    queue + own reading                          work waiting there, and the prompt less p's hit
--   move p -> d  what d lacks / p's rate of moving
--   decode d     how full it is, in steps of its own length
--   alone on d   queue + own reading on d, and how it halts every sequence that runs there
--
-- Reserved and reported tell of the same work, one sooner and one also after Redis lost its memory: the larger counts.
local NO_ROOM_NOW = 8
-- Work also delays whoever comes next, and a prefix read twice takes another one's room: a hit is worth some queueing.
-- On Mooncake's trace a larger weight finds hardly more hits and a smaller one makes first tokens no faster, with the
-- readers a third busy or nearly full.
local OWN_WORK = 16
-- Two workers to call instead of one.
local TWO_CALLS_S = 0.002
local max, ceil, huge = math.max, math.ceil, math.huge

-- Returns each row's hit in tokens, where it has one.
local function hits_of(rows, request)
  local hits = {}
  for generation, count in pairs(request.hits) do
    local i = rows.row[generation]
    if i and rows.revision[i] == request.revision and rows.block_size[i] == request.block_size then
      hits[i] = count * request.block_size
    end
  end
  return hits
end

local function size_on(role, request)
  return request.prompt_tokens + (role == 'decode' and request.new_tokens or 0)
end

local function excludes(request, rows, i)
  return request.excluded and (request.excluded[rows.id[i]] or request.excluded[rows.incarnation[i]])
end

-- Sets rows.cost: of reading the prompt; infinite where that cannot be. Returns how many can. What is lost with a hit
-- counts alike wherever that is: else whoever once seemed a little slower would get hardly anything.
local function weigh_prefills(rows, request)
  rows.hit = hits_of(rows, request)
  local cost, count, prompt = {}, 0, request.prompt_tokens
  local hit, reserved, queued, token_s = rows.hit, rows.reserved_tokens, rows.queued, rows.token_s
  local capacity, draining, lost_s = rows.capacity, rows.draining, (OWN_WORK - 1) * rows.usual
  for i = 1, #token_s do
    if prompt <= capacity[i] and draining[i] == 0 and not excludes(request, rows, i) then
      local tokens = max(prompt - (hit[i] or 0), 1)
      cost[i] = (max(reserved[i], queued[i]) + tokens) * token_s[i] + tokens * lost_s
      count = count + 1
    else
      cost[i] = huge
    end
  end
  rows.cost = cost
  return count
end

-- Sets rows.cost: of writing the answer, whoever reads; rows.missing: tokens to be moved there; rows.least: no row costs
-- less than this with what it lacks, moved at `fastest` seconds a token.
local function weigh_decodes(rows, request, fastest)
  rows.hit = hits_of(rows, request)
  local cost, missing, least = {}, {}, huge
  local count, size, prompt, hit = 0, size_on('decode', request), request.prompt_tokens, rows.hit
  local reserved, used, num_blocks, block_size = rows.reserved_blocks, rows.used, rows.num_blocks, rows.block_size
  local capacity, draining, full_s, sequences_s = rows.capacity, rows.draining, rows.full_s, rows.sequences_s
  for i = 1, #full_s do
    if size <= capacity[i] and draining[i] == 0 and not excludes(request, rows, i) then
      local blocks = max(reserved[i], used[i]) + ceil(size / block_size[i])
      local room = blocks > num_blocks[i] and NO_ROOM_NOW or 0
      cost[i] = blocks / num_blocks[i] * full_s[i] + sequences_s[i] + room
      missing[i] = prompt - (hit[i] or 0)
      local moved = cost[i] + missing[i] * fastest
      if moved < least then least = moved end
      count = count + 1
    else
      cost[i] = huge
    end
  end
  rows.cost, rows.missing, rows.least = cost, missing, least
  return count
end

-- What d's own reading adds to its cost. One that has read nothing yet is taken to read as fast as the prefill worker
-- that it is compared with. Reading halts each sequence that runs there, and this one when it does: a halt counts by how
-- long it is beside a step, for a short one is hardly seen and a long one breaks what a reader of tokens expects.
local function reading_alone(rows, i, compared_token_s)
  local token_s = rows.unmeasured[i] == 1 and compared_token_s or rows.token_s[i]
  local queue, tokens = max(rows.reserved_tokens[i], rows.queued[i]), max(rows.missing[i], 1)
  local halt = (queue + tokens) * token_s
  return (queue + OWN_WORK * tokens) * token_s + (1 + rows.sequences[i]) * halt * halt / rows.step_s[i]
end
