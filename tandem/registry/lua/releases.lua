-- Returns {format, release, workers, gateways} of each other format of which anyone in this namespace has a live lease.
local FIRST_RELEASE = '0.1.0'
local known = {[FIRST_FORMAT] = FIRST_RELEASE}
local said = redis.call('HGETALL', lasting('formats'))
for i = 1, #said, 2 do
  local number = whole(said[i])
  if number then known[number] = said[i + 1] end
end

local found = {}
for number, release in pairs(known) do
  local keys = keys_of(number)
  local workers = redis.call('ZCOUNT', keys .. 'leases', now, '+inf')
  local gateways = 0
  for _, client in ipairs(redis.call('ZRANGEBYSCORE', keys .. 'clients', now, '+inf')) do
    gateways = gateways + redis.call('HEXISTS', keys .. 'gateways', client)
  end
  if number ~= tonumber(format) and workers + gateways > 0 then
    found[#found + 1] = {number, release, workers, gateways}
  end
end
return found
