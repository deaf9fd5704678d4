-- ARGV: reservation, 'tokens' | 'all', and so on in pairs. Returns for each how many parts were released.
return drop_each(1, #ARGV)
