-- Compares all data that the registry holds in two places. Returns the numbers of leases, reservations and clients, and
-- one line for each contradiction.
local wrong = {}
local function complain(...) wrong[#wrong + 1] = table.concat({...}, ' ') end

local num_held, num_parts = 0, 0
for _, worker_id in ipairs(live_workers()) do
  local sums, held = {tokens = 0, blocks = 0}, redis.call('HGETALL', key('held', worker_id))
  for i = 1, #held, 2 do
    local part, reservation = held[i]:match('^(%a+):(.*)$')
    if sums[part] then sums[part] = sums[part] + (whole(held[i + 1]) or 0) end
    num_held = num_held + 1
    if not part or redis.call('HGET', key('reservation', reservation), part) ~= worker_id then
      complain(worker_id, 'holds', held[i], 'which its reservation does not name')
    end
  end
  for part, sum in pairs(sums) do
    local counted = reserved(worker_id, part)
    if counted ~= sum then complain(worker_id, 'counts', counted, part, 'and holds', sum) end
  end
end
for _, reservation in ipairs(redis.call('ZRANGE', key('reservations'), 0, -1)) do
  local parts = redis.call('HLEN', key('reservation', reservation))
  num_parts = num_parts + parts
  if parts == 0 then complain('reservation', reservation, 'names no worker') end
  if redis.call('SISMEMBER', all_of_client(reservation), reservation) == 0 then
    complain('reservation', reservation, 'is not among those of its client')
  end
end
if num_parts ~= num_held then complain(num_parts, 'parts are reserved and', num_held, 'are held') end
return {redis.call('ZCARD', key('leases')), redis.call('ZCARD', key('reservations')), redis.call('ZCARD', key('clients')), wrong}
