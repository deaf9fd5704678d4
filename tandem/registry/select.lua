-- Chooses where one request goes and reserves room for it, as one step.
--
--   1 gather    live workers of the model, as decode and prefill candidates, each with its own cost
--   2 narrow    too small, excluded, draining; the first test that leaves nobody is the reason
--   3 pair      the cheapest (prefill, decode) of equal KV layout and a proven link; equals take turns
--   4 reserve   prompt tokens on the worker that reads it, blocks on the one that decodes
--
-- ARGV: reservation, model, prompt tokens, new tokens, 'require' | 'prefer' | 'never', ttl (ms),
--       JSON list of excluded worker ids or incarnations, then the prompt's block hashes
-- Returns {'ok', reason, decode worker, prefill worker or nothing}, {'none', reason} or {'too large', reason}.
local reservation, model, policy = ARGV[1], ARGV[2], ARGV[5]
local prompt_tokens, new_tokens, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
local FIRST_HASH = 8

-- Cost is in seconds of waiting, roughly: what a nominal worker takes for it. Only the proportions matter.
local PER_PROMPT_TOKEN = 1 / 8192
local PER_TRANSFER_TOKEN = 1 / 131072
local PER_FULL_WORKER = 1
local NO_ROOM_NOW = 8

local excluded = {}
for _, name in ipairs(cjson.decode(ARGV[7])) do excluded[name] = true end

-- Prompt tokens at the start of the prompt whose blocks this worker holds.
local function hit_tokens(worker)
  local hits = 0
  in_chunks(FIRST_HASH, #ARGV, function(first, last)
    for _, held in ipairs(redis.call('SMISMEMBER', key('blocks', worker.id), unpack(ARGV, first, last))) do
      if held == 0 then return false end
      hits = hits + 1
    end
  end)
  return math.min(hits * worker.block_size, prompt_tokens)
end

local TEXTS = {'role', 'model', 'incarnation', 'layout_hash', 'linked', 'draining'}
local NUMBERS = {'block_size', 'num_blocks', 'max_num_seqs', 'max_model_len', 'free_blocks', 'num_waiting',
  'num_running', 'queued_tokens', 'reserved_tokens', 'reserved_blocks', 'chosen'}

local function read(worker_id)
  local worker = {id = worker_id}
  for i, value in ipairs(redis.call('HMGET', key('worker', worker_id), unpack(TEXTS))) do
    worker[TEXTS[i]] = value
  end
  if worker.model ~= model then return nil end
  for i, value in ipairs(redis.call('HMGET', key('worker', worker_id), unpack(NUMBERS))) do
    worker[NUMBERS[i]] = tonumber(value)
  end
  return worker
end

-- Reserved and reported tell of the same work, one sooner and one also after Redis lost its memory: take the larger.
local function weigh(worker)
  local hit = hit_tokens(worker)
  worker.tokens = math.max(prompt_tokens - hit, 1)
  worker.read_cost = (math.max(worker.reserved_tokens, worker.queued_tokens) + worker.tokens) * PER_PROMPT_TOKEN
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
        local pair = {prefill = prefill, decode = decode, cost = cost}
        if linked[decode.incarnation] and better(pair, best) then best = pair end
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

-- Returns what is best under the policy, and why; or nothing, and what is missing.
local function choose(workers)
  if #workers == 0 then return nil, 'no live worker serves model ' .. model end
  local decodes, missing, too_large = candidates(workers, 'decode')
  if missing then return nil, missing, too_large end
  if policy == 'never' then return best_alone(decodes), 'local prefill: asked for' end
  local prefills, why, prefill_too_large = candidates(workers, 'prefill')
  local pair
  if not why then pair, why = best_pair(prefills, decodes) end
  if pair then
    local hits = pair.prefill.hit .. ' prompt tokens cached there, ' .. pair.decode.hit .. ' at decode'
    return pair, 'remote prefill: ' .. hits
  end
  if policy == 'require' then return nil, why, prefill_too_large end
  return best_alone(decodes), 'local prefill: ' .. why
end

local function reserve(part, worker, amount, turn)
  redis.call('HSET', key('held', worker.id), part .. ':' .. reservation, amount)
  redis.call('HINCRBY', key('worker', worker.id), 'reserved_' .. part, amount)
  redis.call('HSET', key('worker', worker.id), 'chosen', turn)
  redis.call('HSET', key('reservation', reservation), part, worker.id)
end

local now = expire_due()
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
return {'ok', reason, redis.call('HGETALL', key('worker', route.decode.id)),
  route.prefill and redis.call('HGETALL', key('worker', route.prefill.id))}
