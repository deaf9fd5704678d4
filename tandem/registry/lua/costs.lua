-- The cost of a request on each worker, in seconds of waiting, its own and other requests'. select.lua compares them.
--
--   prefill p    queue + own prefill                          work waiting there, and the prompt less p's hit
--   or fetch h   what h, of either role, has more of the prompt than p, at h's rate of moving, if that is faster than
--                computing it
--   move p -> d  what d lacks / p's rate of moving so far: near (on one machine or in one NVLink domain), zone, far
--   decode d     how full it is, in steps of its own duration; what the request adds, in steps of about the usual
-- duration
--   alone on d   queue + own prefill (or fetch) on d, and the pauses that it causes to every sequence that runs there
--   late         by how much the first token would come later than the request's target
--
-- Reserved and reported amounts measure the same work. The former is earlier, the latter survives the loss of Redis's
-- data: the larger one counts.
local NO_ROOM_NOW = 8
-- A full worker delays each token of an answer: counted for this many tokens.
local ANSWER_STEPS = 64
-- Work also delays later requests, and a prefix prefilled twice takes another's room: while all prefilling workers are
-- busy, a hit is worth a queue this many times longer than what the hit saves. On Mooncake's trace a larger weight
-- finds hardly more hits and a smaller one makes first tokens no faster, with workers a third busy or nearly fully
-- busy.
local OWN_WORK = 16
-- Measured rates this close to their mean count as equal: the rest is noise, and the slightly fastest would get all
-- work.
local NOISE = 0.25
-- On a busy machine rates are noisier. What waits or runs at a worker counts by its own rate; one more request counts
-- by the usual rate everywhere, unless a worker's rate differs by more than this.
local NOISE_OF_ONE = 0.5
-- Seconds per prefilled token of a model that no worker has measured yet.
local NOMINAL_TOKEN_S = 1 / 8192
-- Seconds to move a token, also for the room that a second copy of the token takes from other prefixes.
local NOMINAL_TRANSFER_S = 1 / 32768
-- A distance without a measurement is assumed to be this many times slower than the next shorter one.
local FARTHER = 2
local NOMINAL_STEP_S = 1 / 64
-- Costs that differ by less than a hit of this many blocks count as equal, too.
local NOISE_BLOCKS = 0.5
-- The cost of calling two workers instead of one.
local TWO_CALLS_S = 0.002
-- The fixed cost of a fetch: to ask another worker for its blocks, and to learn that they have arrived.
local FETCH_S = 0.001
-- The part of a target that is planned with, the same as in the workers' engines.
local PLANNED = 0.9
-- A second later than the target counts this many times.
local LATE = 16
-- A stuck worker is chosen only if all possible workers are stuck.
local STUCK_S = 1e6
-- The cost of reading an adapter into memory, for which another one may be dropped.
local ADAPTER_S = 0.1
local max, ceil, huge = math.max, math.ceil, math.huge

local function excludes(request, rows, i)
  if not request.excluded then return false end
  local id, incarnation = who(rows, i)
  return request.excluded[id] or request.excluded[incarnation]
end

-- Returns the cost of reading the request's adapter on row i.
local function adapting(rows, request, i)
  return request.adapted and not request.adapted[rows.values[(i - 1) * WIDTH + GENERATION]] and ADAPTER_S or 0
end

-- Returns the cost of a first token after so many seconds. Even a little late costs as much as the prompt's own work,
-- at `usual` seconds a token: that much extra work elsewhere is worth it to be in time.
local function lateness(request, seconds, usual)
  local late_s = seconds - PLANNED * request.ttft_s
  return late_s > 0 and LATE * late_s + OWN_WORK * request.prompt_tokens * usual or 0
end

local function size_on(role, request)
  return request.prompt_tokens + (role == 'decode' and request.new_tokens or 0)
end

-- Returns the blocks that the decode worker at `at` takes for the prompt and a likely answer; a longer one takes more
-- later.
local function blocks_on(values, at, request)
  local likely, answer = values[at + LIKELY], request.new_tokens
  if likely > 0 then answer = math.min(answer, likely) end
  return ceil((request.prompt_tokens + answer) / values[at + BLOCK_SIZE])
end

-- Sets rows.row_of: generation -> i.
local function index_generations(rows)
  local row_of, values = {}, rows.values
  for i = 1, rows.count do row_of[values[(i - 1) * WIDTH + GENERATION]] = i end
  rows.row_of = row_of
end

-- Returns row -> hit in blocks, for rows that have any of the prompt. `known`: hits by generation; default
-- request.hits.
local function hits_on(rows, request, known)
  local hits, values, kind = {}, rows.values, request.kind
  known = known or request.hits
  if next(known) and not rows.row_of then index_generations(rows) end
  for generation, blocks in pairs(known) do
    local i = rows.row_of[generation]
    if i and values[(i - 1) * WIDTH + KIND] == kind then hits[i] = blocks end
  end
  return hits
end

-- Returns the mean of the rows that have measured a rate; `nominal` if none has.
local function mean_of(rows, rate, nominal)
  local sum, measured, values = 0, 0, rows.values
  for at = 0, (rows.count - 1) * WIDTH, WIDTH do
    if values[at + rate] > 0 then sum, measured = sum + values[at + rate], measured + 1 end
  end
  return measured > 0 and sum / measured or nominal
end

-- Sets a rate that is within noise of the rows' mean, or not measured yet, to that mean. Returns the mean and the least.
local function level(rows, rate, nominal)
  local mean, least, values = mean_of(rows, rate, nominal), huge, rows.values
  for at = 0, (rows.count - 1) * WIDTH, WIDTH do
    local own = values[at + rate]
    if own == 0 or math.abs(own - mean) <= NOISE * mean then values[at + rate] = mean end
    least = math.min(least, values[at + rate])
  end
  return mean, least
end

local MOVES = {NEAR_S, ZONE_S, FAR_S}

-- Returns which of MOVES leads from the row at `at` to the row of others at `there`.
local function move_between(values, at, others, there)
  local domain = values[at + DOMAIN]
  if values[at + NODE] == others[there + NODE] or domain ~= 0 and domain == others[there + DOMAIN] then return NEAR_S end
  return values[at + ZONE] == others[there + ZONE] and ZONE_S or FAR_S
end

-- Returns a superset of the MOVES that any pair needs.
local function moves_between(rows, others)
  local here, needed = {[NODE] = {}, [DOMAIN] = {}, [ZONE] = {}}, {}
  for at = 0, (others.count - 1) * WIDTH, WIDTH do
    for part, names in pairs(here) do names[others.values[at + part]] = true end
  end
  here[DOMAIN][0] = nil
  for at = 0, (rows.count - 1) * WIDTH, WIDTH do
    local values = rows.values
    if here[NODE][values[at + NODE]] or here[DOMAIN][values[at + DOMAIN]] then needed[NEAR_S] = true end
    needed[here[ZONE][values[at + ZONE]] and ZONE_S or FAR_S] = true
  end
  return needed
end

-- Levels the time of moving over each distance; sets rows.moving: the means. Returns the least time that any pair
-- needs.
local function level_moves(rows, decodes)
  local means, needed, fastest = {}, moves_between(rows, decodes), huge
  rows.moving = {}
  for i, move in ipairs(MOVES) do means[i] = mean_of(rows, move) end
  for i, move in ipairs(MOVES) do
    local nominal = NOMINAL_TRANSFER_S * FARTHER ^ (i - 1)
    for j = #MOVES, i + 1, -1 do nominal = means[j] and means[j] / FARTHER ^ (j - i) or nominal end
    for j = 1, i - 1 do nominal = means[j] and means[j] * FARTHER ^ (i - j) or nominal end
    local mean, least = level(rows, move, nominal)
    rows.moving[move] = mean
    if needed[move] then fastest = math.min(fastest, least) end
  end
  return fastest
end

-- Sets rows.usual: the mean of token_s (of decode workers: of step_s); rows.fastest: the least time of moving.
-- Unmeasured prefill workers are assumed to prefill like decode workers, which have the same model and may have
-- measured it.
local function survey_prefills(rows, decodes)
  rows.usual = level(rows, TOKEN_S, mean_of(decodes, TOKEN_S, NOMINAL_TOKEN_S))
  local fastest = level_moves(rows, decodes)
  rows.fastest = fastest < huge and fastest or 0
end

local function survey_decodes(rows)
  rows.usual = level(rows, STEP_S, NOMINAL_STEP_S)
end

-- Sets rows.behind: true if no row is idle.
-- Sets rows.own_work, the weight of own work: while prefill workers are idle it delays no other request, and several of
-- them prefill a burst with one prefix sooner. The busy share is squared, as a request is hardly ever delayed when few
-- are busy. Under auto a decode worker may prefill as well, where sequences are always delayed.
local function weigh_work(rows, request)
  local busy, values = 0, rows.values
  for at = 0, (rows.count - 1) * WIDTH, WIDTH do
    if max(values[at + TOKENS], values[at + QUEUED]) > 0 then busy = busy + 1 end
  end
  rows.behind = busy == rows.count
  rows.own_work = request.policy == 'auto' and OWN_WORK or 1 + (OWN_WORK - 1) * (busy / rows.count) ^ 2
end

-- Returns the difference up to which costs count as equal, with this weight of own work.
local function tolerance(prefills, request, own_work)
  return NOISE_BLOCKS * request.block_size * own_work * prefills.usual
end

-- Returns a rate moved towards the usual one, by at most the noise.
local function of_one(rate, usual)
  local noise = NOISE_OF_ONE * usual
  return rate - max(-noise, math.min(rate - usual, noise))
end

-- The parts of a location by which a holder is near: a worker fetches from the best holder in one of them, or of all.
local NEARNESS = {NODE, DOMAIN, ZONE, LAYOUT}

-- Sets request.holders: part of NEARNESS -> place -> the worker of either role, even if draining, that is known to hold
-- most of the prompt; of equals the oldest. A place is a KV layout there: the sum of two digests.
local function holders_of(prefills, decodes, request)
  local holders = {[NODE] = {}, [DOMAIN] = {}, [ZONE] = {}, [LAYOUT] = {}}
  for _, rows in ipairs({decodes, prefills}) do
    local values = rows.values
    for i, blocks in pairs(hits_on(rows, request, request.known)) do
      local at = (i - 1) * WIDTH
      if values[at + STUCK] == 0 and not excludes(request, rows, i) then
        local generation, layout, holder = values[at + GENERATION], values[at + LAYOUT], nil
        for part, best in pairs(holders) do
          local place = layout + values[at + part]
          local other = best[place]
          if not other or blocks > other.blocks or blocks == other.blocks and generation < other.generation then
            holder = holder or {rows = rows, row = i, at = at, blocks = blocks, generation = generation}
            best[place] = holder
          end
        end
      end
    end
  end
  request.holders = next(holders[LAYOUT]) and holders
end

-- Returns the tokens that the row at `at`, with a hit of `hit` tokens and `token_s` seconds to compute one, should fetch
-- instead of computing them, the seconds of the fetch, and the holder that saves most. The prompt's last token is always
-- computed.
local function fetched(request, prefills, rows, at, hit, token_s)
  local most, best_tokens, best_s, found, values = 0, 0, 0, nil, rows.values
  local layout, block_size = values[at + LAYOUT], request.block_size
  local whole = math.floor((request.prompt_tokens - 1) / block_size) * block_size
  local best = request.holders and request.holders[LAYOUT][2 * layout]
  if not best or math.min(best.blocks * block_size, whole) <= hit then return 0, 0 end
  for _, part in ipairs(NEARNESS) do
    local holder = request.holders[part][layout + values[at + part]]
    if holder and holder ~= found and (part ~= DOMAIN or values[at + DOMAIN] ~= 0) then
      local there = holder.rows.values
      local move = move_between(there, holder.at, values, at)
      local moving = there[holder.at + move]
      if moving == 0 then moving = prefills.moving[move] end
      local tokens = math.min(holder.blocks * block_size, whole) - hit
      local seconds = FETCH_S + tokens * moving
      if tokens > 0 and tokens * token_s - seconds > most then
        most, best_tokens, best_s, found = tokens * token_s - seconds, tokens, seconds, holder
      end
    end
  end
  return best_tokens, best_s, found
end

-- Returns the holder that row i should fetch from. Blocks that the row is only expected to hold may still be fetched for
-- another request, which may arrive there after this one: so this request names the holder, too.
local function holder_for(request, prefills, rows, i)
  local at, values = (i - 1) * WIDTH, rows.values
  local known = values[at + KIND] == request.kind and request.known[values[at + GENERATION]] or 0
  local token_s = values[at + TOKEN_S] > 0 and values[at + TOKEN_S] or prefills.usual
  local _, _, holder = fetched(request, prefills, rows, at, known * request.block_size, token_s)
  return holder
end

-- Sets rows.cost: the cost of prefilling the prompt, infinite if the row cannot. Returns true if any row can. A lost
-- hit costs the same on every row: else a worker that once seemed a little slower would get hardly any work.
local function weigh_prefills(rows, request)
  weigh_work(rows, request)
  local costs, able, values, hits = {}, false, rows.values, hits_on(rows, request)
  local prompt, block_size, others_s = request.prompt_tokens, request.block_size, (rows.own_work - 1) * rows.usual
  for p = 1, rows.count do
    local at, cost = (p - 1) * WIDTH, huge
    if prompt <= values[at + TAKES] and not excludes(request, rows, p) then
      local hit = (hits[p] or 0) * block_size
      local queue, token_s = max(values[at + TOKENS], values[at + QUEUED]), values[at + TOKEN_S]
      local moved, moving_s = fetched(request, rows, rows, at, hit, token_s)
      local tokens = max(prompt - hit - moved, 1)
      local waiting = queue * token_s + adapting(rows, request, p) + moving_s
      cost = waiting + tokens * (of_one(token_s, rows.usual) + others_s) + lateness(request, waiting + tokens * token_s, rows.usual)
        + values[at + STUCK] * STUCK_S
      able = true
    end
    costs[p] = cost
  end
  rows.cost, rows.hits = costs, hits
  return able
end

-- Sets rows.cost: the cost of writing the answer, wherever the prompt is prefilled, infinite if the row cannot;
-- rows.missing: tokens to be moved there;
-- rows.least: the least cost of any row with its missing tokens, moved at `fastest` seconds a token.
-- Returns true if any row can take the request.
local function weigh_decodes(rows, request, fastest)
  local costs, missing, least, values, hits = {}, {}, huge, rows.values, hits_on(rows, request)
  local size, prompt, block_size = size_on('decode', request), request.prompt_tokens, request.block_size
  for d = 1, rows.count do
    local at, cost, lacking = (d - 1) * WIDTH, huge, prompt - (hits[d] or 0) * block_size
    if size <= values[at + TAKES] and not excludes(request, rows, d) then
      local num_blocks, step_s = values[at + NUM_BLOCKS], values[at + STEP_S]
      local used, own = max(values[at + BLOCKS], values[at + USED]), blocks_on(values, at, request)
      local full = used / num_blocks + values[at + SEQUENCES] / values[at + MAX_NUM_SEQS]
      local room = used + own > num_blocks and NO_ROOM_NOW or 0
      cost = ANSWER_STEPS * (full * step_s + own / num_blocks * of_one(step_s, rows.usual)) + room
        + adapting(rows, request, d) + values[at + STUCK] * STUCK_S
      local moved = cost + lacking * fastest
      if moved < least then least = moved end
    end
    costs[d], missing[d] = cost, lacking
  end
  rows.cost, rows.hits, rows.missing, rows.least = costs, hits, missing, least
  return least < huge
end

-- Returns what a prefill on decode worker d itself adds to its cost. If d has not prefilled yet, it is assumed to be as
-- fast as prefill workers. Prefill pauses each sequence that runs there, and this one once
-- it runs: a pause counts relative to a step's duration, as readers hardly notice a short pause, but a long one.
-- With a target between tokens that leaves room beyond two steps, the engine prefills in that room: no pause is
-- noticed, and prefill is slower by its share of a step. That also holds for prompts that wait there while nothing runs
-- yet: after the first of them its answer runs. If nothing runs, this applies only if prefill workers are `behind`.
-- A fetch costs more than what counts as equal: a conversation stays where it is, rather than be copied at each turn.
local function prefill_alone(rows, d, request, prefills, behind)
  local at, values, usual = (d - 1) * WIDTH, rows.values, prefills.usual
  local token_s = values[at + TOKEN_S] > 0 and values[at + TOKEN_S] or usual
  local moved, moving_s = fetched(request, prefills, rows, at, (rows.hits[d] or 0) * request.block_size, token_s)
  local queue, tokens = max(values[at + TOKENS], values[at + QUEUED]), max(rows.missing[d] - moved, 1)
  local step_s, copied = values[at + STEP_S], moved > 0 and tolerance(prefills, request, OWN_WORK) or 0
  local room_s = PLANNED * request.itl_s - 2 * step_s
  if room_s > 0 and (values[at + SEQUENCES] > 0 or behind) then
    local slower = (step_s + room_s) / room_s
    local waiting = queue * token_s * slower + moving_s
    return waiting + copied + tokens * (of_one(token_s, usual) * slower + (OWN_WORK - 1) * usual)
      + lateness(request, waiting + tokens * token_s * slower, usual)
  end
  local pause = (queue + tokens) * token_s
  return (queue + OWN_WORK * tokens) * token_s + moving_s + copied + (1 + values[at + SEQUENCES]) * pause * pause / step_s
    + lateness(request, pause + moving_s, usual)
end
