-- Ends a request: refunds to its tenant what it took and did not use, and counts what it used.
-- ARGV: tenant, request, day it began, tokens per minute ('' if there is no limit), tokens not used, cost not used,
--   prompt tokens, completion tokens, '1' if its `take` may have been sent twice, cached prompt tokens
-- Returns 1; 0 for a request that does not run, or no longer.
if ARGV[9] == '1' then abandon(ARGV[2]) end
if redis.call('ZREM', key('inside', ARGV[1]), ARGV[2]) == 0 then return 0 end
local limit = tonumber(ARGV[4])
if limit then
  set_bucket(ARGV[1], 'tokens', math.min(limit, bucket_level(ARGV[1], 'tokens', limit) + ARGV[5]))
end
local usage = lasting('usage', ARGV[1] .. ':' .. ARGV[3])
redis.call('HINCRBYFLOAT', usage, 'cost', -ARGV[6])
redis.call('HINCRBY', usage, 'requests', 1)
redis.call('HINCRBY', usage, 'prompt_tokens', ARGV[7])
redis.call('HINCRBY', usage, 'completion_tokens', ARGV[8])
redis.call('HINCRBY', usage, 'cached_tokens', ARGV[10])
redis.call('PEXPIRE', usage, USAGE_KEPT_MS)
return 1
