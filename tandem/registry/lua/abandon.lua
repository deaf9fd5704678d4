-- ARGV: reservation. Releases it; if its making is still under way (on a connection given up), it will not be made.
-- Returns how many parts were released.
local dropped = drop(ARGV[1], 'tokens') + drop(ARGV[1], 'blocks')
abandon(ARGV[1])
return dropped
