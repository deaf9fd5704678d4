-- ARGV: client, ttl (ms), then, for a gateway: its addresses for clients and its demand, both as JSON.
-- Renews a client's own lease; a ttl of 0 ends it. Returns the other gateways' demands.
local KEPT_MS = 60000
local client = ARGV[1]
redis.call('ZADD', key('clients'), now + ARGV[2], client)
if not ARGV[3] then return {} end
redis.call('HSET', lasting('formats'), format, RELEASE)
redis.call('HSET', key('gateways'), client, ARGV[3])
redis.call('HSET', key('demands'), client, ARGV[4])
redis.call('PEXPIRE', key('demands'), KEPT_MS)
local others = {}
local demands = redis.call('HGETALL', key('demands'))
for i = 1, #demands, 2 do
  if not redis.call('ZSCORE', key('clients'), demands[i]) then
    redis.call('HDEL', key('demands'), demands[i])
  elseif demands[i] ~= client then
    others[#others + 1] = demands[i + 1]
  end
end
return others
