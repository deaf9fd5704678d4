-- Chooses workers for requests and reserves room on them: for all requests that came to a gateway during its last call,
-- one after the other, as one atomic step.
--
--   1 undo      a request sent twice (its answer was lost) releases what it holds
--   2 read      every worker of the model (rows.lua)
--   then for each request, in order:
--   3 hits      from the gateway's replica, by generation, so that no ended one counts; and expected hits
--   4 weigh     every worker that can take it (costs.lua)
--   5 choose    the cheapest pair of equal KV layout and a proven link, or the decode worker alone
--   6 reserve   prompt tokens on the worker that prefills it, blocks on the one that decodes
--   7 expect    the prompt's blocks on both, until they report them
--
-- Every worker is weighed, so the choice is the best possible; the tests compare it with brute force. Only pairs are
-- skipped: once the cheapest prefill worker has its decode worker, a prefill worker that could not win even with the
-- cheapest decode worker is not paired. Of equals the least recently chosen is taken.
--
-- The call also carries releases, which are made first, so that choices see them.
--
-- ARGV: (epoch.lua) client, ttl of its own lease (ms, 0: it has none); the number of releases' arguments, and these
--   (release.lua); then for each request: reservation, model, prompt tokens, new tokens, 'require' | 'prefer' | 'auto' |
--   'never', ttl (ms), JSON list of excluded worker ids or incarnations, the prompt's revision, block size, marks
--   (expected.lua), hits: 'blocks:generation,generation,… blocks:generation,…'; for a request with an adapter the
--   generations that hold the adapter: 'generation generation …', else '-'; and the targets to the first token and
--   between tokens (ms), 0 if none
-- Returns the epoch; for each release the number of parts released; then for each request: {'ok', why, Fallback or '',
-- decode worker, its generation, its hit (tokens), the same three of the prefill worker, and of the worker that is fetched
-- from; each '', '', 0 if there is none}, {'none', reason}, {'too large', reason} or {'no link', reason}.
local ARGUMENTS = 14
local REFUSALS = {too_large = 'too large', no_proven_link = 'no link'}

local function names_in(json)
  if json == '[]' then return nil end
  local names = {}
  for _, name in ipairs(cjson.decode(json)) do names[name] = true end
  return names
end

local function hits_in(text)
  local hits = {}
  for count, generations in text:gmatch('(%d+):(%S+)') do
    for generation in generations:gmatch('%d+') do hits[tonumber(generation)] = tonumber(count) end
  end
  return hits
end

local function generations_in(text)
  if text == '-' then return nil end
  local found = {}
  for generation in text:gmatch('%d+') do found[tonumber(generation)] = true end
  return found
end

local function seconds_in(milliseconds)
  return milliseconds ~= '0' and tonumber(milliseconds) / 1000 or nil
end

local function parse(start)
  return {
    reservation = ARGV[start], model = ARGV[start + 1], prompt_tokens = tonumber(ARGV[start + 2]),
    new_tokens = tonumber(ARGV[start + 3]), policy = ARGV[start + 4], ttl = tonumber(ARGV[start + 5]),
    excluded = names_in(ARGV[start + 6]), kind = kind_of(ARGV[start + 7], ARGV[start + 8]),
    block_size = tonumber(ARGV[start + 8]), marks = ARGV[start + 9], hits = hits_in(ARGV[start + 10]),
    adapted = generations_in(ARGV[start + 11]), ttft_s = seconds_in(ARGV[start + 12]) or huge,
    itl_s = seconds_in(ARGV[start + 13]) or 0,
  }
end

-- Returns why no row could take the request: the first test that all rows failed, as a text and as a Fallback.
local function why_none(rows, role, request)
  local of_model = ' ' .. role .. ' worker of model ' .. request.model
  if rows.count == 0 then return 'no live' .. of_model, 'no_live_worker' end
  local fitting, admitted = 0, 0
  for i = 1, rows.count do
    if size_on(role, request) <= rows.values[(i - 1) * WIDTH + CAPACITY] then
      fitting = fitting + 1
      if not excludes(request, rows, i) then admitted = admitted + 1 end
    end
  end
  if fitting == 0 then
    local size = request.prompt_tokens .. ' prompt and ' .. request.new_tokens .. ' new tokens'
    return 'no' .. of_model .. ' is large enough for ' .. size, 'too_large'
  end
  local test = admitted == 0 and 'excluded' or 'draining'
  return 'every' .. of_model .. ' that could take the request is ' .. test, test
end

local function linked(prefills, p, decodes, d)
  local sender, _ = who(prefills, p)
  local _, incarnation = who(decodes, d)
  return sender and incarnation and redis.call('SISMEMBER', key('links', sender), incarnation) == 1
end

-- Returns prefill row p with its cheapest decode row: of equals the least recently chosen. Tests links if `prove`.
local function decode_for(p, prefills, decodes, prove)
  local at, values, others = (p - 1) * WIDTH, prefills.values, decodes.values
  local layout, writing, missing = values[at + LAYOUT], decodes.cost, decodes.missing
  local least, longest, found = huge, huge, nil
  for d = 1, decodes.count do
    local there = (d - 1) * WIDTH
    local cost = writing[d] + missing[d] * values[at + move_between(values, at, others, there)]
    if (cost < least or cost == least and cost < huge and others[there + CHOSEN] < longest)
      and layout == others[there + LAYOUT] and not (prove and not linked(prefills, p, decodes, d)) then
      least, longest, found = cost, others[there + CHOSEN], d
    end
  end
  return found and {prefill = p, decode = found, cost = prefills.cost[p] + least}
end

-- Returns the least recently chosen of the prefill rows of least cost, within `slack`; and the least cost.
local function longest_unchosen(prefills, slack)
  local costs, least, longest, found = prefills.cost, huge, huge, nil
  for p = 1, prefills.count do least = math.min(least, costs[p]) end
  for p = 1, prefills.count do
    local chosen = prefills.values[(p - 1) * WIDTH + CHOSEN]
    if costs[p] <= least + slack and chosen < longest then longest, found = chosen, p end
  end
  return found, least
end

-- Returns the cheapest pair; of pairs that are equally cheap, within `slack`, the least recently chosen prefill
-- worker's.
local function cheapest_pair(prefills, decodes, slack, prove)
  local next_p, least_read = longest_unchosen(prefills, slack)
  local pair = decode_for(next_p, prefills, decodes, prove)
  if pair and pair.cost <= least_read + decodes.least + slack then return pair end  -- no pair can cost much less
  local least, pairs_found = huge, {}
  for p = 1, prefills.count do
    local read_s = prefills.cost[p]
    pair = read_s < huge and read_s + decodes.least <= least + slack and decode_for(p, prefills, decodes, prove)
    if pair then pairs_found[#pairs_found + 1], least = pair, math.min(least, pair.cost) end
  end
  local best, longest = nil, huge
  for _, found in ipairs(pairs_found) do
    local chosen = prefills.values[(found.prefill - 1) * WIDTH + CHOSEN]
    if found.cost <= least + slack and chosen < longest then best, longest = found, chosen end
  end
  return best
end

-- Returns the cheapest linked pair. Nearly always all are linked, so links are tested only if the cheapest pair has
-- none.
local function best_pair(prefills, decodes, slack)
  local best = cheapest_pair(prefills, decodes, slack, false)
  if best and not linked(prefills, best.prefill, decodes, best.decode) then
    best = cheapest_pair(prefills, decodes, slack, true)
  end
  return best
end

local function why_no_pair(prefills, decodes, request)
  for p, read_s in ipairs(prefills.cost) do
    local layout = prefills.values[(p - 1) * WIDTH + LAYOUT]
    for d, cost in ipairs(decodes.cost) do
      if read_s < huge and cost < huge and layout == decodes.values[(d - 1) * WIDTH + LAYOUT] then
        local missing = 'no prefill worker has a proven link to a decode worker of model '
        return missing .. request.model, 'no_proven_link'
      end
    end
  end
  return 'no prefill worker has the KV layout of a decode worker of model ' .. request.model, 'kv_layout'
end

local function best_alone(prefills, decodes, request, behind)
  local costs, least, best, slack = {}, huge, nil, tolerance(prefills, request, OWN_WORK)
  for d = 1, decodes.count do
    local writing = decodes.cost[d]
    costs[d] = writing < least + slack and writing + prefill_alone(decodes, d, request, prefills, behind) or huge
    least = math.min(least, costs[d])
  end
  for d = 1, decodes.count do
    local chosen = decodes.values[(d - 1) * WIDTH + CHOSEN]
    if costs[d] < huge and costs[d] <= least + slack and not (best and chosen >= best.chosen) then
      best = {decode = d, cost = costs[d], chosen = chosen}
    end
  end
  return best or {cost = huge}
end

local function cheaper(chosen, other)
  return string.format('cheapest: %.0f ms, %s %.0f', chosen.cost * 1000, chosen.prefill and 'local' or 'remote',
    other.cost * 1000)
end

-- Returns the best route under the policy or nothing, why, and the Fallback if the route is not what the policy asks
-- for.
local function choose(prefills, decodes, request)
  if prefills.count + decodes.count == 0 then return nil, 'no live worker serves model ' .. request.model end
  if not weigh_decodes(decodes, request, prefills.fastest) then return nil, why_none(decodes, 'decode', request) end
  if request.policy == 'never' then return best_alone(prefills, decodes, request), 'asked for' end
  local can_read = weigh_prefills(prefills, request)
  local pair = can_read and best_pair(prefills, decodes, tolerance(prefills, request, prefills.own_work))
  if not pair then
    local why, fallback
    if can_read then why, fallback = why_no_pair(prefills, decodes, request)
    else why, fallback = why_none(prefills, 'prefill', request) end
    return request.policy ~= 'require' and best_alone(prefills, decodes, request), why, fallback
  end
  if request.policy == 'require' then return pair, 'required' end
  if request.policy == 'prefer' and pair.cost < STUCK_S then return pair, 'preferred' end
  pair.cost = pair.cost + TWO_CALLS_S
  local alone = best_alone(prefills, decodes, request, prefills.behind)
  if request.policy == 'prefer' then
    if alone.cost >= STUCK_S then return pair, 'preferred' end
    return alone, 'every pair of model ' .. request.model .. ' is stuck in a step', 'stuck'
  end
  if alone.cost < pair.cost then return alone, cheaper(alone, pair) end
  return pair, cheaper(pair, alone)
end

-- Returns row i as a place in a route. `hit`: the blocks that it holds; default the row's hit.
local function place(rows, i, request, hit)
  local at, values = (i - 1) * WIDTH, rows.values
  return {
    id = who(rows, i), rows = rows, at = at, generation = string.format('%.0f', values[at + GENERATION]),
    hit = (hit or rows.hits[i] or 0) * request.block_size,
  }
end

-- Reserves a part, in Redis and in the rows by which later requests of this call are weighed.
local function hold(request, part, worker, amount)
  local rows, counted = worker.rows, worker.at + (part == 'tokens' and TOKENS or BLOCKS)
  redis.call('HSET', key('held', worker.id), part .. ':' .. request.reservation, amount)
  add_reserved(rows.of, worker.at / WIDTH, part, amount)
  rows.values[counted] = rows.values[counted] + amount
end

-- Notes that a worker was chosen: the next time, others of equal cost come first.
local function note_chosen(worker, turn)
  redis.call('BITFIELD', key('rows', worker.rows.of), 'SET', 'i64', counter(worker.at / WIDTH, 'chosen'), turn)
  worker.rows.values[worker.at + CHOSEN] = turn
end

local function reserve(request, prefill, decode, holder)
  hold(request, 'tokens', prefill, max(request.prompt_tokens - max(prefill.hit, holder and holder.hit or 0), 1))
  hold(request, 'blocks', decode, blocks_on(decode.rows.values, decode.at, request))
  redis.call('HSET', key('reservation', request.reservation), 'tokens', prefill.id, 'blocks', decode.id)
  redis.call('ZADD', key('reservations'), now + request.ttl, request.reservation)
  redis.call('SADD', all_of_client(request.reservation), request.reservation)
end

-- True if a row's worker has the generation that its hash names.
local function is_current(place)
  return place.id and redis.call('HGET', key('worker', place.id), 'generation') == place.generation
end

local read = {}
local function pools(model)
  if not read[model] then
    read[model] = {read_rows('prefill', model), read_rows('decode', model)}
    survey_prefills(read[model][1], read[model][2])
    survey_decodes(read[model][2])
  end
  return unpack(read[model])
end

local route
local function without(stale, request, turn)
  mended(key('rows', stale.rows.of))
  cut_row(stale.rows.of, stale.at / WIDTH)
  read[request.model] = nil
  return route(request, turn)
end

function route(request, turn)
  local prefills, decodes = pools(request.model)
  request.known = {}  -- a copy, as add_expected changes hits
  for generation, blocks in pairs(request.hits) do request.known[generation] = blocks end
  holders_of(prefills, decodes, request)
  add_expected(prefills, decodes, request)
  local best, why, fallback = choose(prefills, decodes, request)
  if not best then return {REFUSALS[fallback] or 'none', why} end
  local decode = place(decodes, best.decode, request)
  local prefill = best.prefill and place(prefills, best.prefill, request)
  local fetch = holder_for(request, prefills, prefill and prefills or decodes, best.prefill or best.decode)
  local holder = fetch and place(fetch.rows, fetch.row, request, fetch.blocks)
  for _, part in pairs({decode, prefill or nil, holder or nil}) do
    if not is_current(part) then return without(part, request, turn) end
  end
  reserve(request, prefill or decode, decode, holder)
  note_chosen(decode, turn)
  if prefill then note_chosen(prefill, turn) end
  expect(request, (prefill or decode).generation, decode.generation)
  local none = {id = '', generation = '', hit = 0}
  local from, by = holder or none, prefill or none
  return {'ok', why, fallback or '', decode.id, decode.generation, decode.hit, by.id, by.generation, by.hit,
    from.id, from.generation, from.hit}
end

if ARGV[2] ~= '0' then redis.call('ZADD', key('clients'), now + ARGV[2], ARGV[1]) end
local released = 3 + tonumber(ARGV[3])
local answers, requests = {epoch, unpack(drop_each(4, released))}, {}
for start = released + 1, #ARGV, ARGUMENTS do
  local request = parse(start)
  if redis.call('EXISTS', key('reservation', request.reservation)) == 1 then
    drop(request.reservation, 'tokens')
    drop(request.reservation, 'blocks')
  end
  requests[#requests + 1] = request
end
local turn = redis.call('INCRBY', key('turn'), #requests) - #requests + 1
if not whole(turn) then
  redis.call('DEL', key('turn'))
  turn = 0
end
for i, request in ipairs(requests) do
  if redis.call('EXISTS', key('abandoned', request.reservation)) == 1 then
    answers[#answers + 1] = {'none', 'the reservation was given up'}
  else
    answers[#answers + 1] = route(request, turn + i - 1)
  end
end
return answers
