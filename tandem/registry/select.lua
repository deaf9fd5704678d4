-- Chooses where requests go and reserves room for them: all that came to a gateway while its call before was under way,
-- one after the other, as one step. Everyone sees them all or none.
--
--   1 undo      a request sent twice (its answer was lost) gives back what it holds
--   2 read      every worker of the model, once for all requests: two commands, whatever their number
--   then for each request, in order:
--   3 hits      what the gateway's replica says, by generation, so nothing counts that has ended; and what is expected
--   4 weigh     every worker that can take it (costs.lua)
--   5 choose    the cheapest pair of equal KV layout and a proven link, or the decode worker alone
--   6 reserve   prompt tokens on the worker that reads it, blocks on the one that decodes
--   7 expect    the prompt's blocks on both, until they tell of them
--
-- No worker is left out before it is weighed, so what is chosen is the best there is (test_optimum.py compares it with
-- brute force). Pairs are: a prefill worker that could not win with the cheapest decode worker is not paired at all,
-- which leaves a few rows of the table of pairs.
--
-- ARGV, for each request: reservation, model, prompt tokens, new tokens, 'require' | 'prefer' | 'auto' | 'never',
--   ttl (ms), JSON list of excluded worker ids or incarnations, the prompt's revision, block size, marks (expected.lua)
--   and hits: JSON list of [number of blocks, [generation, …]]
-- Returns for each: {'ok', why, decode worker, its generation, its hit (tokens), and the same three of the prefill
-- worker if there is one}, {'none', reason} or {'too large', reason}.
local ARGUMENTS = 11
local now = expire_due()

local function parse(start)
  local request = {
    reservation = ARGV[start], model = ARGV[start + 1], prompt_tokens = tonumber(ARGV[start + 2]),
    new_tokens = tonumber(ARGV[start + 3]), policy = ARGV[start + 4], ttl = tonumber(ARGV[start + 5]),
    revision = ARGV[start + 7], block_size = tonumber(ARGV[start + 8]), marks = ARGV[start + 9],
    excluded = {}, hits = {}, now = now,
  }
  for _, name in ipairs(cjson.decode(ARGV[start + 6])) do request.excluded[name] = true end
  for _, held in ipairs(cjson.decode(ARGV[start + 10])) do
    for _, generation in ipairs(held[2]) do request.hits[generation] = held[1] end
  end
  return request
end

local function size_on(worker, request)
  return request.prompt_tokens + (worker.role == 'decode' and request.new_tokens or 0)
end

local function excludes(request, worker)
  return request.excluded[worker.id] or request.excluded[worker.incarnation]
end

-- Workers that can take the request, weighed. They start at another one each time, so that equals take turns.
local function able(workers, request, weigh, turn)
  local kept, count = {}, #workers
  for i = 0, count - 1 do
    local worker = workers[(turn + i) % count + 1]
    if size_on(worker, request) <= worker.capacity and worker.draining == 0 and not excludes(request, worker) then
      weigh(worker, request)
      kept[#kept + 1] = worker
    end
  end
  return kept
end

-- Why `able` found none: the first of its tests that nobody passed. Second, whether waiting can not help.
local function why_none(workers, role, request)
  local of_model = ' ' .. role .. ' worker of model ' .. request.model
  if #workers == 0 then return 'no live' .. of_model end
  local fitting, admitted = 0, 0
  for _, worker in ipairs(workers) do
    if size_on(worker, request) <= worker.capacity then
      fitting = fitting + 1
      if not excludes(request, worker) then admitted = admitted + 1 end
    end
  end
  if fitting == 0 then
    local size = request.prompt_tokens .. ' prompt and ' .. request.new_tokens .. ' new tokens'
    return 'no' .. of_model .. ' is large enough for ' .. size, true
  end
  return 'every' .. of_model .. ' that could take the request is ' .. (admitted == 0 and 'excluded' or 'draining')
end

local function linked(prefill, decode)
  prefill.links = prefill.links or {}
  if prefill.links[decode.id] == nil then
    prefill.links[decode.id] = redis.call('SISMEMBER', key('links', prefill.id), decode.incarnation) == 1
  end
  return prefill.links[decode.id]
end

local function best_pair(prefills, decodes, pool)
  local best, cheapest = nil, math.huge
  if #prefills == 0 then return nil end
  for _, decode in ipairs(decodes) do
    cheapest = math.min(cheapest, decode.cost + decode.missing * pool.fastest_transfer_s)
  end
  for _, prefill in ipairs(prefills) do
    if prefill.num_links > 0 and (not best or prefill.cost + cheapest < best.cost) then
      for _, decode in ipairs(decodes) do
        local cost = cost_of_pair(prefill, decode)
        if prefill.layout_hash == decode.layout_hash and (not best or cost < best.cost) and linked(prefill, decode) then
          best = {prefill = prefill, decode = decode, cost = cost}
        end
      end
    end
  end
  return best
end

local function why_no_pair(prefills, decodes, request)
  for _, prefill in ipairs(prefills) do
    for _, decode in ipairs(decodes) do
      if prefill.layout_hash == decode.layout_hash then
        return 'no prefill worker has a proven link to a decode worker of model ' .. request.model
      end
    end
  end
  return 'no prefill worker has the KV layout of a decode worker of model ' .. request.model
end

local function best_alone(decodes, compared_with)
  local best
  for _, decode in ipairs(decodes) do
    local cost = cost_alone(decode, compared_with)
    if not best or cost < best.cost then best = {decode = decode, cost = cost} end
  end
  return best
end

local function cheaper(chosen, other)
  return string.format('cheapest: %.0f ms, %s %.0f', chosen.cost * 1000, chosen.prefill and 'local' or 'remote',
    other.cost * 1000)
end

-- Returns the best route under the policy, and why; or nothing, what is missing, and whether waiting can not help.
local function choose(pool, request, turn)
  if #pool.decode + #pool.prefill == 0 then return nil, 'no live worker serves model ' .. request.model end
  local decodes = able(pool.decode, request, weigh_decode, turn)
  if #decodes == 0 then return nil, why_none(pool.decode, 'decode', request) end
  if request.policy == 'never' then return best_alone(decodes), 'asked for' end
  local prefills = able(pool.prefill, request, weigh_prefill, turn)
  local pair = best_pair(prefills, decodes, pool)
  if not pair then
    local why, too_large = why_no_pair(prefills, decodes, request), false
    if #prefills == 0 then why, too_large = why_none(pool.prefill, 'prefill', request) end
    if request.policy == 'require' then return nil, why, too_large end
    return best_alone(decodes), why
  end
  if request.policy ~= 'auto' then return pair, request.policy == 'require' and 'required' or 'preferred' end
  pair.cost = pair.cost + TWO_CALLS_S
  local alone = best_alone(decodes, pair.prefill)
  if alone.cost < pair.cost then return alone, cheaper(alone, pair) end
  return pair, cheaper(pair, alone)
end

local function reserve(request, part, worker, amount)
  redis.call('HSET', key('held', worker.id), part .. ':' .. request.reservation, amount)
  redis.call('HINCRBY', key('reserved'), part .. ':' .. worker.id, amount)
  redis.call('HSET', key('reservation', request.reservation), part, worker.id)
  worker['reserved_' .. part] = worker['reserved_' .. part] + amount
  settle(worker)
end

local function route(pool, request, turn)
  add_expected(pool, request)
  local best, why, too_large = choose(pool, request, turn)
  if not best then return {too_large and 'too large' or 'none', why} end
  local prefill, decode = best.prefill, best.decode
  reserve(request, 'tokens', prefill or decode, (prefill or decode).tokens)
  reserve(request, 'blocks', decode, decode.blocks)
  redis.call('ZADD', key('reservations'), now + request.ttl, request.reservation)
  expect(request, prefill or decode, decode)
  local answer = {'ok', why, decode.id, decode.generation, decode.hit}
  if prefill then answer[6], answer[7], answer[8] = prefill.id, prefill.generation, prefill.hit end
  return answer
end

local requests = {}
for start = 1, #ARGV, ARGUMENTS do
  local request = parse(start)
  drop(request.reservation, 'tokens')
  drop(request.reservation, 'blocks')
  requests[#requests + 1] = request
end
local counters, reserved = redis.call('HGETALL', key('reserved')), {}
for i = 1, #counters, 2 do reserved[counters[i]] = counters[i + 1] end
local turn = redis.call('INCRBY', key('turn'), #requests) - #requests
local pools, answers = {}, {}
for i, request in ipairs(requests) do
  if redis.call('EXISTS', key('abandoned', request.reservation)) == 1 then
    answers[i] = {'none', 'the reservation was given up'}
  else
    pools[request.model] = pools[request.model] or read_pool(request.model, reserved)
    answers[i] = route(pools[request.model], request, turn + i - 1)
  end
end
return answers
