-- How an incarnation of a worker died. ARGV: the incarnation, and, of who knows, what there is to say (JSON).
-- Whoever says it first is believed; so many deaths are remembered, and for so long. Returns what is known, or ''.
local MOST, KEPT_MS = 64, 600000
local of = key('death', ARGV[1])
if ARGV[2] and redis.call('SET', of, ARGV[2], 'PX', KEPT_MS, 'NX') then
  redis.call('RPUSH', key('deaths'), ARGV[1])
  if redis.call('LLEN', key('deaths')) > MOST then redis.call('DEL', key('death', redis.call('LPOP', key('deaths')))) end
end
return redis.call('GET', of) or ''
