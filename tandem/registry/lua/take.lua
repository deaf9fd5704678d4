-- Takes the most that a request may use from its tenant's limits, all or nothing; else returns what it has to wait for.
--
--   bucket:<tenant>      hash: requests, tokens: what was left at requests_at, tokens_at (ms); refilled by the minute
--   inside:<tenant>      sorted set: running request (named like a reservation) -> when it expires (ms)
--   usage:<tenant>:<day> hash: cost, requests, prompt_tokens, completion_tokens
--
-- ARGV: (epoch.lua) tenant, request, ttl (ms), requests per minute, tokens per minute, concurrent requests, daily
--   budget (each '' without a limit), the most tokens and cost of the request
-- Returns {epoch, the limit that is exhausted or '', ms until it may have room, requests left, ms until that bucket is
-- full, tokens left, ms until that bucket is full, day}.
local tenant, request, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local per_minute = {requests = tonumber(ARGV[4]), tokens = tonumber(ARGV[5])}
local concurrent, budget = tonumber(ARGV[6]), tonumber(ARGV[7])
local wanted = {requests = 1, tokens = tonumber(ARGV[8])}
local cost, day = ARGV[9], string.format('%.0f', math.floor(now / DAY_MS))
local inside, usage = key('inside', tenant), lasting('usage', tenant .. ':' .. day)

-- Requests of dead gateways expire here.
local function num_inside()
  redis.call('ZREMRANGEBYSCORE', inside, '-inf', now)
  if redis.call('ZCARD', inside) >= concurrent then
    for _, name in ipairs(redis.call('ZRANGE', inside, 0, -1)) do
      if not redis.call('ZSCORE', key('clients'), name:match('([^/]*)/%d+$')) then redis.call('ZREM', inside, name) end
    end
  end
  return redis.call('ZCARD', inside)
end

local level = {}
for part, limit in pairs(per_minute) do level[part] = bucket_level(tenant, part, limit) end

local function lacking()
  for _, part in ipairs({'requests', 'tokens'}) do
    local limit = per_minute[part]
    if limit and level[part] < wanted[part] then return part, (wanted[part] - level[part]) * MINUTE_MS / limit end
  end
  if concurrent and num_inside() >= concurrent then return 'concurrent', 1000 end
  if budget and (finite(redis.call('HGET', usage, 'cost')) or 0) + cost > budget then
    return 'budget', DAY_MS - now % DAY_MS
  end
  return '', 0
end

local taken = redis.call('ZSCORE', inside, request)
local lack, wait = '', 0
if redis.call('EXISTS', key('abandoned', request)) == 1 then
  lack = 'concurrent'
elseif not taken then
  lack, wait = lacking()
end
if lack == '' and not taken then
  for part in pairs(per_minute) do
    level[part] = level[part] - wanted[part]
    set_bucket(tenant, part, level[part])
  end
  redis.call('ZADD', inside, now + ttl, request)
  redis.call('PEXPIREAT', inside, now + math.max(ttl, DAY_MS))
  redis.call('HINCRBYFLOAT', usage, 'cost', cost)
  redis.call('PEXPIRE', usage, USAGE_KEPT_MS)
end

local answer = {epoch, lack, math.ceil(wait)}
for _, part in ipairs({'requests', 'tokens'}) do
  local limit, left = per_minute[part], level[part]
  answer[#answer + 1] = limit and math.max(0, math.floor(left)) or -1
  answer[#answer + 1] = limit and math.ceil((limit - left) * MINUTE_MS / limit) or 0
end
answer[#answer + 1] = day
return answer
