-- The death of a worker's incarnation. ARGV: the incarnation, and, to report its death, the report (JSON).
-- The first report counts. MOST deaths are kept, each for KEPT_MS. Returns the report, or ''.
local MOST, KEPT_MS = 64, 600000
local of = key('death', ARGV[1])
if ARGV[2] and redis.call('SET', of, ARGV[2], 'PX', KEPT_MS, 'NX') then
  redis.call('RPUSH', key('deaths'), ARGV[1])
  if redis.call('LLEN', key('deaths')) > MOST then redis.call('DEL', key('death', redis.call('LPOP', key('deaths')))) end
end
return redis.call('GET', of) or ''
