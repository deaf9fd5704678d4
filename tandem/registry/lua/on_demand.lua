-- Models that launchers start on demand. ARGV: 'tell', ttl (ms), name, text, …: a launcher's statuses of its models,
-- valid for `ttl`; or 'ask', name, ms since it ran, ms since it was wanted (-1: never), …: a gateway's use of models.
-- Returns to a launcher: name, ms since it ran at any gateway, ms since it was wanted, …; to a gateway: name, text, …
-- of all models with a status.
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
