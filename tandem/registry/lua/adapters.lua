-- The adapters that the cluster serves. ARGV: nothing; 'put', name, text; 'restore', name, text, name, text, …: those
-- whose names are unknown; or 'drop', name.
-- Returns the epoch (empty if nothing was ever registered), and {name, text, …} of all there are then.
local adapters = key('adapters')
if ARGV[1] == 'put' then redis.call('HSET', adapters, ARGV[2], ARGV[3])
elseif ARGV[1] == 'restore' then for i = 2, #ARGV, 2 do redis.call('HSETNX', adapters, ARGV[i], ARGV[i + 1]) end
elseif ARGV[1] == 'drop' then redis.call('HDEL', adapters, ARGV[2]) end
return {redis.call('GET', key('epoch')) or '', redis.call('HGETALL', adapters)}
