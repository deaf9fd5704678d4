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
local MARK = 'I4c8'

-- Sets request.counts and request.names: of each mark.
local function read_marks(request)
  local count = #request.marks / struct.size(MARK)
  local flat = {struct.unpack('<' .. MARK:rep(count), request.marks)}
  request.counts, request.names = {}, {}
  for i = 1, count do request.counts[i], request.names[i] = flat[2 * i - 1], flat[2 * i] end
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

local function period_key(back)
  return key('expected', string.format('%.0f', math.floor(now / PERIOD_MS) - back))
end

local current, before = period_key(0), period_key(1)

local function pair_of(name)
  return redis.call('HGET', current, name) or redis.call('HGET', before, name)
end

-- The best hit (blocks) that the replica knows of, of that role which has the lesser.
local function known_to_both(prefills, decodes, hits)
  if not next(hits) or prefills.count > 0 and prefills.known == 0 then return 0 end
  local known, packed = 0, decodes.packed
  for at = SURVEYED_AT, #packed, ROW_BYTES do
    known = max(known, hits[read('>d', packed, at)] or 0)
  end
  return prefills.count == 0 and known or math.min(prefills.known, known)
end

-- Raises the hits of the pair that is about to hold more of this prompt than both are known to.
local function add_expected(prefills, decodes, request)
  read_marks(request)
  local counts, names, known = request.counts, request.names, known_to_both(prefills, decodes, request.hits)
  local first = last_where(1, #counts, function(i) return counts[i] <= known end) + 1
  request.first_mark = first
  if first > #counts or not pair_of(names[first]) then return end
  local deepest = last_where(first + 1, #counts, function(i) return pair_of(names[i]) end)
  for text in pair_of(names[deepest]):gmatch('%S+') do
    local generation = tonumber(text)
    request.hits[generation] = max(request.hits[generation] or 0, counts[deepest])
  end
end

-- The pair, given by their generations, is about to hold this prompt. What nobody reads any more is freed by another
-- thread: expiring it would stop the server for as long as a hundred thousand entries take.
local function expect(request, reader, decode)
  if request.first_mark > #request.names then return end
  local count = redis.call('HLEN', current)
  if count == 0 then redis.call('UNLINK', period_key(2)) end
  if count > MOST_ENTRIES then return end
  local pair, entries = reader .. ' ' .. decode, {}
  for i = request.first_mark, #request.names do
    entries[#entries + 1], entries[#entries + 2] = request.names[i], pair
  end
  redis.call('HSET', current, unpack(entries))
  redis.call('PEXPIRE', current, 2 * PERIOD_MS)
end
