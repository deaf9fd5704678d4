-- Models that a launcher starts when they are asked for. ARGV: 'tell', ttl (ms), name, text, …: what a launcher says of its own,
-- which holds for that time; or 'ask', name, ms since it ran, ms since it was wanted, …: what a gateway says of them, -1
-- where it never did or was. Returns a launcher: name, ms since it ran anywhere, ms since it was wanted, …; a gateway:
-- name, text, … of all that there are.
local texts, ends, used = key('on_demand'), key('on_demand_ends'), key('on_demand_used')
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now)) do
  redis.call('ZREM', ends, name)
  redis.call('HDEL', texts, name)
  redis.call('HDEL', used, 'ran:' .. name, 'wanted:' .. name)
end

local function note(what, name, ago)
  local at = now - tonumber(ago)
  local before = whole(redis.call('HGET', used, what .. ':' .. name)) or 0
  if tonumber(ago) >= 0 and (at > before or before > now) then
    redis.call('HSET', used, what .. ':' .. name, at)
  end
end

local function ago(what, name)
  local at = whole(redis.call('HGET', used, what .. ':' .. name))
  return at and math.max(0, now - at) or -1
end

if ARGV[1] == 'ask' then
  for i = 2, #ARGV, 3 do
    if redis.call('HEXISTS', texts, ARGV[i]) == 1 then
      note('ran', ARGV[i], ARGV[i + 1])
      note('wanted', ARGV[i], ARGV[i + 2])
    end
  end
  return redis.call('HGETALL', texts)
end
local found = {}
for i = 3, #ARGV, 2 do
  local name = ARGV[i]
  redis.call('ZADD', ends, now + ARGV[2], name)
  redis.call('HSET', texts, name, ARGV[i + 1])
  for _, value in ipairs({name, ago('ran', name), ago('wanted', name)}) do found[#found + 1] = value end
end
return found
