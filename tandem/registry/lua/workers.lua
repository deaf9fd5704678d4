-- Returns the epoch (empty if nothing was ever registered) and every live worker's hash as field, value, …
local rows = {redis.call('GET', key('epoch')) or ''}
for _, worker_id in ipairs(live_workers()) do
  local row = redis.call('HGETALL', key('worker', worker_id))
  for _, part in ipairs({'tokens', 'blocks'}) do
    row[#row + 1] = 'reserved_' .. part
    row[#row + 1] = tostring(reserved(worker_id, part))
  end
  rows[#rows + 1] = row
end
return rows
