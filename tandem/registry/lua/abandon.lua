-- ARGV: reservation. Releases it; if its making is still under way (on a connection given up), it will not be made.
drop(ARGV[1], 'tokens')
drop(ARGV[1], 'blocks')
redis.call('SET', key('abandoned', ARGV[1]), '', 'PX', 120000)
