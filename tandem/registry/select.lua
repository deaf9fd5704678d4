-- Chooses where requests go and reserves room for them: all that came to a gateway while its call before was under way,
-- one after the other, as one step. Everyone sees them all or none.
--
--   1 undo      a request sent twice (its answer was lost) gives back what it holds
--   2 read      every worker of the model, once for all requests (table.lua)
--   then for each request, in order:
--   3 hits      what the gateway's replica says, by generation, so nothing counts that has ended; and what is expected
--   4 weigh     every worker that can take it (costs.lua)
--   5 choose    the cheapest pair of equal KV layout and a proven link, or the decode worker alone
--   6 reserve   prompt tokens on the worker that reads it, blocks on the one that decodes
--   7 expect    the prompt's blocks on both, until they tell of them
--
-- No worker is left out before it is weighed, so what is chosen is the best there is; the tests compare it with brute
-- force. Only pairs are left out: a prefill worker that could not win with the cheapest decode worker is paired with
-- none, which leaves one to three of them. Every scan starts at another row each time, so that equals take turns.
--
-- ARGV, for each request: reservation, model, prompt tokens, new tokens, 'require' | 'prefer' | 'auto' | 'never',
--   ttl (ms), JSON list of excluded worker ids or incarnations, the prompt's revision, block size, marks (expected.lua)
--   and hits: JSON list of [number of blocks, [generation, …]]
-- Returns for each: {'ok', why, decode worker, its generation, its hit (tokens), and the same three of the prefill
-- worker if there is one}, {'none', reason} or {'too large', reason}.
local ARGUMENTS = 11

local function names_in(json)
  if json == '[]' then return nil end
  local names = {}
  for _, name in ipairs(cjson.decode(json)) do names[name] = true end
  return names
end

local function hits_in(json)
  local hits = {}
  if json == '[]' then return hits end
  for _, held in ipairs(cjson.decode(json)) do
    for _, generation in ipairs(held[2]) do hits[generation] = held[1] end
  end
  return hits
end

local function parse(start)
  return {
    reservation = ARGV[start], model = ARGV[start + 1], prompt_tokens = tonumber(ARGV[start + 2]),
    new_tokens = tonumber(ARGV[start + 3]), policy = ARGV[start + 4], ttl = tonumber(ARGV[start + 5]),
    excluded = names_in(ARGV[start + 6]), revision = ARGV[start + 7], block_size = tonumber(ARGV[start + 8]),
    marks = ARGV[start + 9], hits = hits_in(ARGV[start + 10]),
  }
end

-- Why no row could take it: the first test that nobody passed. Second, whether waiting can not help.
local function why_none(rows, role, request)
  local of_model = ' ' .. role .. ' worker of model ' .. request.model
  if #rows.id == 0 then return 'no live' .. of_model end
  local fitting, admitted = 0, 0
  for i, capacity in ipairs(rows.capacity) do
    if size_on(role, request) <= capacity then
      fitting = fitting + 1
      if not excludes(request, rows, i) then admitted = admitted + 1 end
    end
  end
  if fitting == 0 then
    local size = request.prompt_tokens .. ' prompt and ' .. request.new_tokens .. ' new tokens'
    return 'no' .. of_model .. ' is large enough for ' .. size, true
  end
  return 'every' .. of_model .. ' that could take the request is ' .. (admitted == 0 and 'excluded' or 'draining')
end

local function linked(prefills, p, decodes, d)
  local asked = p * 65536 + d
  if prefills.links[asked] == nil then
    prefills.links[asked] = redis.call('SISMEMBER', key('links', prefills.id[p]), decodes.incarnation[d]) == 1
  end
  return prefills.links[asked]
end

-- The cheapest decode row for prefill row p, if that makes a pair cheaper than `best`; else `best`.
local function pair_with(p, prefills, decodes, best, turn)
  local layout, transfer_s, reading = prefills.layout_hash[p], prefills.transfer_s[p], prefills.cost[p]
  local writing, missing, count = decodes.cost, decodes.missing, #decodes.cost
  for i = turn, turn + count - 1 do
    local d = i % count + 1
    if writing[d] < huge then
      local cost = reading + (writing[d] + missing[d] * transfer_s)
      if cost < best.cost and layout == decodes.layout_hash[d] and linked(prefills, p, decodes, d) then
        best = {prefill = p, decode = d, cost = cost}
      end
    end
  end
  return best
end

local function best_pair(prefills, decodes, turn)
  local best, count, reading, least = {cost = huge}, #prefills.cost, prefills.cost, decodes.least
  for i = turn, turn + count - 1 do
    local p = i % count + 1
    if reading[p] + least < best.cost and prefills.num_links[p] > 0 then
      best = pair_with(p, prefills, decodes, best, turn)
    end
  end
  return best.decode and best
end

local function why_no_pair(prefills, decodes, request)
  for p, cost in ipairs(prefills.cost) do
    for d, other in ipairs(decodes.cost) do
      if cost < huge and other < huge and prefills.layout_hash[p] == decodes.layout_hash[d] then
        return 'no prefill worker has a proven link to a decode worker of model ' .. request.model
      end
    end
  end
  return 'no prefill worker has the KV layout of a decode worker of model ' .. request.model
end

local function best_alone(decodes, turn, compared_token_s)
  local best, count = {cost = huge}, #decodes.cost
  for i = turn, turn + count - 1 do
    local d = i % count + 1
    if decodes.cost[d] < best.cost then
      local cost = decodes.cost[d] + reading_alone(decodes, d, compared_token_s)
      if cost < best.cost then best = {decode = d, cost = cost} end
    end
  end
  return best
end

local function cheaper(chosen, other)
  return string.format('cheapest: %.0f ms, %s %.0f', chosen.cost * 1000, chosen.prefill and 'local' or 'remote',
    other.cost * 1000)
end

-- Returns the best route under the policy, and why; or nothing, what is missing, and whether waiting can not help.
local function choose(prefills, decodes, request, turn)
  if #prefills.id + #decodes.id == 0 then return nil, 'no live worker serves model ' .. request.model end
  if weigh_decodes(decodes, request, prefills.fastest) == 0 then return nil, why_none(decodes, 'decode', request) end
  if request.policy == 'never' then return best_alone(decodes, turn), 'asked for' end
  local can_read = weigh_prefills(prefills, request) > 0
  local pair = can_read and best_pair(prefills, decodes, turn)
  if not pair then
    local why, too_large
    if can_read then why = why_no_pair(prefills, decodes, request)
    else why, too_large = why_none(prefills, 'prefill', request) end
    if request.policy == 'require' then return nil, why, too_large end
    return best_alone(decodes, turn), why
  end
  if request.policy ~= 'auto' then return pair, request.policy == 'require' and 'required' or 'preferred' end
  pair.cost = pair.cost + TWO_CALLS_S
  local alone = best_alone(decodes, turn, prefills.token_s[pair.prefill])
  if alone.cost < pair.cost then return alone, cheaper(alone, pair) end
  return pair, cheaper(pair, alone)
end

local function reserve(request, part, rows, i, amount)
  local id = rows.id[i]
  redis.call('HSET', key('held', id), part .. ':' .. request.reservation, amount)
  redis.call('HINCRBY', key('reserved', part), id, amount)
  rows['reserved_' .. part][i] = rows['reserved_' .. part][i] + amount
  return id
end

local function route(workers, request, turn)
  local prefills, decodes = workers.prefill, workers.decode
  add_expected(workers, request)
  local best, why, too_large = choose(prefills, decodes, request, turn)
  if not best then return {too_large and 'too large' or 'none', why} end
  local readers, reader, d = decodes, best.decode, best.decode
  if best.prefill then readers, reader = prefills, best.prefill end
  local tokens = max(request.prompt_tokens - (readers.hit[reader] or 0), 1)
  local blocks = ceil(size_on('decode', request) / decodes.block_size[d])
  local reads = reserve(request, 'tokens', readers, reader, tokens)
  local writes = reserve(request, 'blocks', decodes, d, blocks)
  redis.call('HSET', key('reservation', request.reservation), 'tokens', reads, 'blocks', writes)
  redis.call('ZADD', key('reservations'), now + request.ttl, request.reservation)
  expect(request, readers.generation[reader], decodes.generation[d])
  local answer = {'ok', why, decodes.id[d], decodes.generation[d], decodes.hit[d] or 0}
  if best.prefill then
    answer[6], answer[7], answer[8] = prefills.id[reader], prefills.generation[reader], prefills.hit[reader] or 0
  end
  return answer
end

local requests = {}
for start = 1, #ARGV, ARGUMENTS do
  local request = parse(start)
  drop(request.reservation, 'tokens')
  drop(request.reservation, 'blocks')
  requests[#requests + 1] = request
end
local turn = redis.call('INCRBY', key('turn'), #requests) - #requests
local tables, answers = {}, {}
for i, request in ipairs(requests) do
  if redis.call('EXISTS', key('abandoned', request.reservation)) == 1 then
    answers[i] = {'none', 'the reservation was given up'}
  else
    tables[request.model] = tables[request.model] or read_table(request.model)
    answers[i] = route(tables[request.model], request, turn + i - 1)
  end
end
return answers
