-- ARGV: reservation, 'tokens' | 'all', and so on in pairs. Returns for each how many parts were given back.
return drop_each(1, #ARGV)
