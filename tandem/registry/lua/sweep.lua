-- Deletes what has expired, even if no other script runs. Returns the numbers of leases, reservations and block
-- locations deleted, and of leases and reservations left.
-- The sweeping process may name its address for Prometheus (ARGV[1]), which is valid for ten seconds.
-- It also deletes unreadable workers; in turn, what one worker holds for no reservation; and some names of reservations
-- that do not exist. A client whose lease was lost gets one for as long as it takes to renew it.
local LOOKED_AT, RENEWED_MS = 256, 3000

local function drop_names(turn)
  local names = key('reservations')
  local parts = math.max(1, math.ceil(redis.call('ZCARD', names) / LOOKED_AT))
  local first = turn % parts * LOOKED_AT
  for _, name in ipairs(redis.call('ZRANGE', names, first, first + LOOKED_AT - 1)) do
    local client = name:match('([^/]*)/%d+$')
    if redis.call('EXISTS', key('reservation', name)) == 0 then
      forget_if_empty(name)
      mended(names)
    elseif client then
      redis.call('ZADD', key('clients'), 'NX', now + RENEWED_MS, client)
    end
  end
end

local function drop_strays(worker_id)
  local held, of, row = key('held', worker_id), place_of(worker_id)
  for _, field in ipairs(redis.call('HKEYS', held)) do
    local part, reservation = field:match('^(%a+):(.*)$')
    if not part or redis.call('HGET', key('reservation', reservation), part) ~= worker_id then
      redis.call('HDEL', held, field)
      mended(held)
    end
  end
  for _, part in ipairs(of and {'tokens', 'blocks'} or {}) do
    add_reserved(of, row, part, held_by(worker_id, part) - reserved(worker_id, part))
  end
end

for _, worker_id in ipairs(live_workers()) do
  if not is_intact(worker_id) then
    mended(key('worker', worker_id))
    retire(worker_id)
  end
end
local whole_workers, turn = live_workers(), whole(redis.call('INCR', key('sweeps'))) or 0
if #whole_workers > 0 then drop_strays(whole_workers[turn % #whole_workers + 1]) end
drop_names(turn)
if ARGV[1] and ARGV[1] ~= '' then redis.call('SET', key('keeper'), ARGV[1], 'PX', 10000) end
return {
  num_leases_ended, num_reservations_ended, num_blocks_forgotten,
  redis.call('ZCARD', key('leases')), redis.call('ZCARD', key('reservations')),
}
