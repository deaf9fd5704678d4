-- Returns the epoch (empty if nothing was ever registered), {key, number of wrong values recently deleted there, …},
-- and for every live worker its id and its hash as field, value, …
local rows = {known_epoch(), redis.call('HGETALL', key('mended'))}
for _, worker_id in ipairs(live_workers()) do
  local row = redis.call('HGETALL', key('worker', worker_id))
  for _, part in ipairs({'tokens', 'blocks'}) do
    row[#row + 1] = 'reserved_' .. part
    row[#row + 1] = tostring(reserved(worker_id, part))
  end
  rows[#rows + 1] = worker_id
  rows[#rows + 1] = row
end
return rows
