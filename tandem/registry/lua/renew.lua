-- ARGV: client, ttl (ms), then, of a gateway: its model, where clients reach it and what it has to do, both as JSON.
-- Renews a client's own lease; a ttl of 0 ends it. Returns what the other gateways of the model have to do.
local KEPT_MS = 60000
local client, model = ARGV[1], ARGV[3]
redis.call('ZADD', key('clients'), now + ARGV[2], client)
if not model then return {} end
redis.call('HSET', key('gateways'), client, ARGV[4])
redis.call('HSET', key('demands', model), client, ARGV[5])
redis.call('PEXPIRE', key('demands', model), KEPT_MS)
local others = {}
local demands = redis.call('HGETALL', key('demands', model))
for i = 1, #demands, 2 do
  if not redis.call('ZSCORE', key('clients'), demands[i]) then
    redis.call('HDEL', key('demands', model), demands[i])
  elseif demands[i] ~= client then
    others[#others + 1] = demands[i + 1]
  end
end
return others
