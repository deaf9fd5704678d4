-- What is about to be cached: from the moment a request is routed until its workers tell of its blocks, its prompt is
-- found here, so the next request with the same beginning follows at once, whichever gateway it comes through.
--
--   marks of a prompt    blocks 1 2 … 16   18 20 … 32   36 … 64   and its last; each as 4 bytes count, 8 bytes hash
--   expected:<period>    mark's hash -> 'generation generation' of the pair that was last given a prompt with it
--
-- The search begins behind the best hit that is known (of prefill and of decode workers, the lesser) and halves from
-- there; the pair then chosen is written from there on. Entries live for one to two periods; a wrong one costs a miss.
local PERIOD_MS = 10000
local MOST_ENTRIES = 200000
local MARK_BYTES = 12

local function num_marks(request)
  return #request.marks / MARK_BYTES
end

local function count_at(request, i)
  return (struct.unpack('<I4', request.marks, (i - 1) * MARK_BYTES + 1))
end

local function hash_at(request, i)
  return request.marks:sub((i - 1) * MARK_BYTES + 5, i * MARK_BYTES)
end

-- The last i of first .. last for which test(i) is true, where it is true for those before it; else first - 1.
local function last_where(first, last, test)
  local low, high = first - 1, last
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if test(middle) then low = middle else high = middle - 1 end
  end
  return low
end

-- The first mark behind `count` blocks.
local function mark_behind(request, count)
  return last_where(1, num_marks(request), function(i) return count_at(request, i) <= count end) + 1
end

local function period_key(request, back)
  return key('expected', string.format('%.0f', math.floor(request.now / PERIOD_MS) - back))
end

local function pair_at(request, i)
  local hash = hash_at(request, i)
  return redis.call('HGET', period_key(request, 0), hash) or redis.call('HGET', period_key(request, 1), hash)
end

-- The best hit (blocks) that the replica knows of, of that role which has the lesser.
local function known_to_both(pool, request)
  local best = {prefill = 0, decode = 0}
  for generation, count in pairs(request.hits) do
    local role = pool.roles[generation]
    if role then best[role] = math.max(best[role], count) end
  end
  return #pool.prefill == 0 and best.decode or math.min(best.prefill, best.decode)
end

-- Raises the hits of the pair that is about to hold more of this prompt than both are known to.
local function add_expected(pool, request)
  request.first_mark = mark_behind(request, known_to_both(pool, request))
  if request.first_mark > num_marks(request) or not pair_at(request, request.first_mark) then return end
  local deepest = last_where(request.first_mark + 1, num_marks(request), function(i) return pair_at(request, i) end)
  for generation in pair_at(request, deepest):gmatch('%S+') do
    request.hits[generation] = math.max(request.hits[generation] or 0, count_at(request, deepest))
  end
end

local function expect(request, reader, decode)
  local current = period_key(request, 0)
  if request.first_mark > num_marks(request) or redis.call('HLEN', current) > MOST_ENTRIES then return end
  local pair, entries = reader.generation .. ' ' .. decode.generation, {}
  for i = request.first_mark, num_marks(request) do
    entries[#entries + 1] = hash_at(request, i)
    entries[#entries + 1] = pair
  end
  redis.call('HSET', current, unpack(entries))
  redis.call('PEXPIRE', current, 2 * PERIOD_MS)
end
