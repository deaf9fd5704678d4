-- ARGV: client, ttl (ms). Renews a client's own lease; a ttl of 0 ends it.
redis.call('ZADD', key('clients'), now + ARGV[2], ARGV[1])
