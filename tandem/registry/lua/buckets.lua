-- Token buckets, shared by the scripts of tenants' limits: a bucket refills completely in a minute.
local MINUTE_MS = 60000
local DAY_MS = 86400000
local USAGE_KEPT_MS = 40 * DAY_MS

local function bucket_level(tenant, part, limit)
  local left, at = unpack(redis.call('HMGET', lasting('bucket', tenant), part, part .. '_at'))
  left, at = finite(left), whole(at)
  if not (left and at) then return limit end
  return math.min(limit, math.max(0, left) + math.max(0, now - at) * limit / MINUTE_MS)
end

local function set_bucket(tenant, part, level)
  redis.call('HSET', lasting('bucket', tenant), part, level, part .. '_at', now)
  redis.call('PEXPIRE', lasting('bucket', tenant), 2 * MINUTE_MS)
end
