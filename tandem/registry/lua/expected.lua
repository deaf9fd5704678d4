-- Expected cache content: from the moment a request is routed until its workers report its blocks, its prompt is found
-- here, so that the next request with the same prefix follows it immediately, through whichever gateway.
--
--   marks of a prompt    blocks 1 2 … 16   18 20 … 32   36 … 64   and its last; each as 4 bytes count, 8 bytes hash
--   expected:<period>    mark's hash -> 'generation generation' of the pair that last got a prompt with this mark
--
-- The binary search begins after the best known hit (the smaller of the two roles' best hits). The pair then chosen is
-- written to the marks after that hit. Entries live for one to two periods; a wrong entry costs a cache miss.
local PERIOD_MS = 10000
local MOST_ENTRIES = 200000
local MARK_BYTES, COUNT_BYTES = 12, 4

local function num_marks(request)
  return #request.marks / MARK_BYTES
end

local function mark_count(request, i)
  return struct.unpack('<I4', request.marks, (i - 1) * MARK_BYTES + 1)
end

local function mark_name(request, i)
  return request.marks:sub((i - 1) * MARK_BYTES + COUNT_BYTES + 1, i * MARK_BYTES)
end

-- Returns the last i of first .. last for which test(i) is true, given that it is true for all before; else first - 1.
local function last_where(first, last, test)
  local low, high = first - 1, last
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if test(middle) then low = middle else high = middle - 1 end
  end
  return low
end

local function period_key(back)
  return key('expected', string.format('%.0f', math.floor(now / PERIOD_MS) - back))
end

local current, before = period_key(0), period_key(1)

local function pair_of(name)
  return redis.call('HGET', current, name) or redis.call('HGET', before, name)
end

local function best_hit(rows, request)
  local best = 0
  for _, blocks in pairs(hits_on(rows, request)) do best = max(best, blocks) end
  return best
end

-- Returns the smaller of the two roles' best known hits, in blocks.
local function known_to_both(prefills, decodes, request)
  if not next(request.hits) then return 0 end
  local known = best_hit(decodes, request)
  return prefills.count == 0 and known or math.min(best_hit(prefills, request), known)
end

-- Raises the hits of the pair that is expected to hold more of this prompt than both are known to hold.
local function add_expected(prefills, decodes, request)
  local known, count = known_to_both(prefills, decodes, request), num_marks(request)
  local first = last_where(1, count, function(i) return mark_count(request, i) <= known end) + 1
  request.first_mark = first
  if first > count or not pair_of(mark_name(request, first)) then return end
  local deepest = last_where(first + 1, count, function(i) return pair_of(mark_name(request, i)) end)
  local blocks = mark_count(request, deepest)
  for text in pair_of(mark_name(request, deepest)):gmatch('%S+') do
    local generation = whole(text)
    if generation then request.hits[generation] = max(request.hits[generation] or 0, blocks) end
  end
end

-- Notes that a pair, given by generations, will hold this prompt. The oldest period's entries are unlinked, to be freed
-- by another thread: their expiry would block the server for as long as it takes to free a hundred thousand entries.
local function expect(request, prefill, decode)
  local last = num_marks(request)
  if request.first_mark > last then return end
  local count = redis.call('HLEN', current)
  if count == 0 then redis.call('UNLINK', period_key(2)) end
  if count > MOST_ENTRIES then return end
  local pair, entries = prefill .. ' ' .. decode, {}
  for i = request.first_mark, last do
    entries[#entries + 1], entries[#entries + 2] = mark_name(request, i), pair
  end
  redis.call('HSET', current, unpack(entries))
  redis.call('PEXPIRE', current, 2 * PERIOD_MS)
end
