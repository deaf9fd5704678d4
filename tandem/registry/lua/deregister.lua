-- ARGV: worker id, incarnation
-- The incarnation is fenced even if its lease is gone already, so that a late heartbeat cannot register it again.
redis.call('SET', key('fenced', ARGV[1] .. ' ' .. ARGV[2]), '', 'PX', FENCE_MS)
if redis.call('HGET', key('worker', ARGV[1]), 'incarnation') == ARGV[2] then retire(ARGV[1]) end
