-- Returns the epoch (empty if nothing was ever registered) and every live worker's hash as field, value, …
expire_due()
local rows = {redis.call('GET', key('epoch')) or ''}
for _, worker_id in ipairs(live_workers()) do
  rows[#rows + 1] = redis.call('HGETALL', key('worker', worker_id))
end
return rows
