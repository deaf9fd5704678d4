-- ARGV: reservation, 'tokens' | 'all', and so on in pairs. Returns for each the number of parts released.
return drop_each(1, #ARGV)
