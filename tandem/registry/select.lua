-- Chooses where one request goes and reserves room for it, as one step.
--
--   1 gather    live workers of the model, as decode and prefill candidates, each with its prefix hit and its own cost
--   2 narrow    too small, excluded, draining; the first test that leaves nobody is the reason
--   3 pair      the cheapest (prefill, decode) of equal KV layout and a proven link; equals take turns
--   4 reserve   prompt tokens on the worker that reads it, blocks on the one that decodes
--   5 expect    the prompt's blocks on both, for a while: the next request with this prefix follows at once
--
-- ARGV: reservation, model, prompt tokens, new tokens, 'require' | 'prefer' | 'never', ttl (ms),
--       JSON list of excluded worker ids or incarnations; the prompt's prefix: revision, block size, JSON list of
--       block counts, and as one string the hash of the last block of each
-- Returns {'ok', reason, decode worker, prefill worker or nothing}, {'none', reason} or {'too large', reason}.
local reservation, model, policy = ARGV[1], ARGV[2], ARGV[5]
local prompt_tokens, new_tokens, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
local revision, block_size, counts, hashes = ARGV[8], tonumber(ARGV[9]), cjson.decode(ARGV[10]), ARGV[11]
local hash_bytes = #hashes / #counts
local now = expire_due()

-- Cost is in seconds of waiting, roughly: what a nominal worker takes for it. Only the proportions matter.
local PER_PROMPT_TOKEN = 1 / 8192
-- Moving a token, and the room that a second copy of it takes from other prefixes.
local PER_TRANSFER_TOKEN = 1 / 32768
local PER_FULL_WORKER = 1
local NO_ROOM_NOW = 8
-- Work also delays whoever comes next, so a worker's own share of it counts twice: a hit is worth some queueing.
local OWN_WORK = 2
-- Longer than a prompt takes to be read and told of; one that never is costs a cache miss.
local EXPECTED_MS = 10000

local excluded = {}
for _, name in ipairs(cjson.decode(ARGV[7])) do excluded[name] = true end

local function hash(i)
  return hashes:sub((i - 1) * hash_bytes + 1, i * hash_bytes)
end

local function holds(worker, i)
  if redis.call('SISMEMBER', key('blocks', worker.id), hash(i)) == 1 then return true end
  local expected_until = redis.call('ZSCORE', key('expected', worker.id), hash(i))
  return expected_until and tonumber(expected_until) > now
end

-- How many of the prefix's hashes this worker holds. A worker that holds one holds those before it.
local function count_hits(worker)
  if #counts == 0 or worker.revision ~= revision or worker.block_size ~= block_size or not holds(worker, 1) then
    return 0
  end
  local low, high = 1, #counts
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if holds(worker, middle) then low = middle else high = middle - 1 end
  end
  return low
end

local TEXTS = {'role', 'model', 'revision', 'incarnation', 'layout_hash', 'linked', 'draining'}
local NUMBERS = {'block_size', 'num_blocks', 'max_num_seqs', 'max_model_len', 'free_blocks', 'num_waiting',
  'num_running', 'queued_tokens', 'reserved_tokens', 'reserved_blocks', 'chosen'}

local FIELDS = {unpack(TEXTS)}
for _, name in ipairs(NUMBERS) do FIELDS[#FIELDS + 1] = name end

local function read(worker_id)
  local worker = {id = worker_id}
  local values = redis.call('HMGET', key('worker', worker_id), unpack(FIELDS))
  for i, name in ipairs(TEXTS) do worker[name] = values[i] end
  for i, name in ipairs(NUMBERS) do worker[name] = tonumber(values[#TEXTS + i]) end
  return worker.model == model and worker or nil
end

-- Reserved and reported tell of the same work, one sooner and one also after Redis lost its memory: take the larger.
local function weigh(worker)
  worker.hits = count_hits(worker)
  local hit = (counts[worker.hits] or 0) * worker.block_size
  worker.tokens = math.max(prompt_tokens - hit, 1)
  local queued = math.max(worker.reserved_tokens, worker.queued_tokens)
  worker.read_cost = (queued + OWN_WORK * worker.tokens) * PER_PROMPT_TOKEN
  worker.blocks = math.ceil((prompt_tokens + new_tokens) / worker.block_size)
  local used = math.max(worker.reserved_blocks, worker.num_blocks - worker.free_blocks) + worker.blocks
  local sequences = worker.num_running + worker.num_waiting
  worker.write_cost = (used / worker.num_blocks + sequences / worker.max_num_seqs) * PER_FULL_WORKER
  if used > worker.num_blocks then worker.write_cost = worker.write_cost + NO_ROOM_NOW end
  worker.transfer_cost = (prompt_tokens - hit) * PER_TRANSFER_TOKEN
  worker.hit = hit
end

local function fits(worker)
  local tokens = worker.role == 'decode' and prompt_tokens + new_tokens or prompt_tokens
  return tokens <= worker.max_model_len and math.ceil(tokens / worker.block_size) <= worker.num_blocks
end

local function keep(workers, test)
  local kept = {}
  for _, worker in ipairs(workers) do
    if test(worker) then kept[#kept + 1] = worker end
  end
  return kept
end

-- Returns the workers of `role` that can take the request, or none and why.
local function candidates(workers, role)
  local of_model = ' ' .. role .. ' worker of model ' .. model
  local kept = keep(workers, function(w) return w.role == role end)
  if #kept == 0 then return kept, 'no live' .. of_model end
  kept = keep(kept, fits)
  if #kept == 0 then
    local size = prompt_tokens .. ' prompt and ' .. new_tokens .. ' new tokens'
    return kept, 'no' .. of_model .. ' is large enough for ' .. size, true
  end
  kept = keep(kept, function(w) return not excluded[w.id] and not excluded[w.incarnation] end)
  if #kept == 0 then return kept, 'every' .. of_model .. ' that could take the request is excluded' end
  kept = keep(kept, function(w) return w.draining ~= '1' end)
  if #kept == 0 then return kept, 'every' .. of_model .. ' that could take the request is draining' end
  for _, worker in ipairs(kept) do weigh(worker) end
  return kept
end

local function linked_to(prefill)
  local incarnations = {}
  for _, incarnation in ipairs(cjson.decode(prefill.linked)) do incarnations[incarnation] = true end
  return incarnations
end

-- Cheaper wins; of equals, the one whose decode worker, then whose prefill worker, was chosen longest ago.
local function better(a, b)
  if not b or a.cost ~= b.cost then return not b or a.cost < b.cost end
  if a.decode.chosen ~= b.decode.chosen then return a.decode.chosen < b.decode.chosen end
  return a.prefill ~= nil and a.prefill.chosen < b.prefill.chosen
end

local function best_pair(prefills, decodes)
  local best, same_layout = nil, false
  for _, prefill in ipairs(prefills) do
    local linked = linked_to(prefill)
    for _, decode in ipairs(decodes) do
      if prefill.layout_hash == decode.layout_hash then
        same_layout = true
        local cost = prefill.read_cost + (decode.write_cost + decode.transfer_cost)
        if linked[decode.incarnation] and (not best or cost <= best.cost) then
          local pair = {prefill = prefill, decode = decode, cost = cost}
          if better(pair, best) then best = pair end
        end
      end
    end
  end
  if best then return best end
  if not same_layout then return nil, 'no prefill worker has the KV layout of a decode worker of model ' .. model end
  return nil, 'no prefill worker has a proven link to a decode worker of model ' .. model
end

local function best_alone(decodes)
  local best
  for _, decode in ipairs(decodes) do
    local alone = {decode = decode, cost = decode.read_cost + decode.write_cost}
    if better(alone, best) then best = alone end
  end
  return best
end

local function alone(decodes, why)
  local route = best_alone(decodes)
  return route, 'local prefill: ' .. why .. '; ' .. route.decode.hit .. ' prompt tokens cached at decode'
end

-- Returns what is best under the policy, and why; or nothing, and what is missing.
local function choose(workers)
  if #workers == 0 then return nil, 'no live worker serves model ' .. model end
  local decodes, missing, too_large = candidates(workers, 'decode')
  if missing then return nil, missing, too_large end
  if policy == 'never' then return alone(decodes, 'asked for') end
  local prefills, why, prefill_too_large = candidates(workers, 'prefill')
  local pair
  if not why then pair, why = best_pair(prefills, decodes) end
  if pair then
    local hits = pair.prefill.hit .. ' prompt tokens cached there, ' .. pair.decode.hit .. ' at decode'
    return pair, 'remote prefill: ' .. hits
  end
  if policy == 'require' then return nil, why, prefill_too_large end
  return alone(decodes, why)
end

local function reserve(part, worker, amount, turn)
  redis.call('HSET', key('held', worker.id), part .. ':' .. reservation, amount)
  redis.call('HINCRBY', key('worker', worker.id), 'reserved_' .. part, amount)
  redis.call('HSET', key('worker', worker.id), 'chosen', turn)
  redis.call('HSET', key('reservation', reservation), part, worker.id)
end

local function expect(worker)
  if worker.hits == #counts or worker.revision ~= revision or worker.block_size ~= block_size then return end
  local expected, entries = key('expected', worker.id), {}
  for i = worker.hits + 1, #counts do
    entries[#entries + 1] = now + EXPECTED_MS
    entries[#entries + 1] = hash(i)
  end
  redis.call('ZREMRANGEBYSCORE', expected, '-inf', now)
  redis.call('ZADD', expected, unpack(entries))
  redis.call('PEXPIRE', expected, EXPECTED_MS)
end

-- The same reservation asked for again (its answer was lost on the way) is made anew, not twice.
drop(reservation, 'tokens')
drop(reservation, 'blocks')
if redis.call('EXISTS', key('abandoned', reservation)) == 1 then return {'none', 'the reservation was given up'} end
local workers = {}
for _, worker_id in ipairs(live_workers()) do workers[#workers + 1] = read(worker_id) end
local route, reason, too_large = choose(workers)
if not route then return {too_large and 'too large' or 'none', reason} end

local turn = redis.call('INCR', key('turn'))
local reader = route.prefill or route.decode
reserve('tokens', reader, reader.tokens, turn)
reserve('blocks', route.decode, route.decode.blocks, turn)
redis.call('ZADD', key('reservations'), now + ttl, reservation)
expect(route.decode)
if route.prefill then expect(route.prefill) end
return {'ok', reason, redis.call('HGETALL', key('worker', route.decode.id)),
  route.prefill and redis.call('HGETALL', key('worker', route.prefill.id))}
