-- ARGV: reservation. Releases it; if a call that makes it is still on its way (on an old connection), it will do
-- nothing. Returns how many parts were released.
local dropped = drop(ARGV[1], 'tokens') + drop(ARGV[1], 'blocks')
abandon(ARGV[1])
return dropped
