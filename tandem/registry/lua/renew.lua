-- ARGV: client, ttl (ms), then, of a gateway: its model and where clients reach it, as JSON. Renews a client's own lease; a
-- ttl of 0 ends it.
redis.call('ZADD', key('clients'), now + ARGV[2], ARGV[1])
if ARGV[3] then redis.call('HSET', key('gateways'), ARGV[1], ARGV[3]) end
