-- Names that the cluster serves besides its models. ARGV: the list, 'adapters' or 'aliases'; then nothing; 'put', name,
-- text; 'restore', name, text, name, text, … (only unknown names are added); or 'drop', name.
-- Returns the epoch (empty if nothing was ever registered), and the list's new content: {name, text, …}.
local list = key(ARGV[1])
if ARGV[2] == 'put' then redis.call('HSET', list, ARGV[3], ARGV[4])
elseif ARGV[2] == 'restore' then for i = 3, #ARGV, 2 do redis.call('HSETNX', list, ARGV[i], ARGV[i + 1]) end
elseif ARGV[2] == 'drop' then redis.call('HDEL', list, ARGV[3]) end
return {known_epoch(), redis.call('HGETALL', list)}
