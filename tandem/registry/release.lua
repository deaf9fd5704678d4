-- ARGV: reservation, then the parts to give back. Returns how many of them there still were.
expire_due()
local dropped = 0
for i = 2, #ARGV do
  dropped = dropped + drop(ARGV[1], ARGV[i])
end
return dropped
