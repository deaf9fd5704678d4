-- ARGV: reservation, 'tokens' | 'all', and so on in pairs. Returns for each how many parts were given back.
local dropped = {}
for i = 1, #ARGV, 2 do
  local count = drop(ARGV[i], 'tokens')
  if ARGV[i + 1] == 'all' then count = count + drop(ARGV[i], 'blocks') end
  dropped[#dropped + 1] = count
end
return dropped
