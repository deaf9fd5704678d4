-- Forgets what is past its time even where nothing else calls. Returns how many leases, reservations and block locations
-- that were, and how many leases and reservations there are.
-- Who sweeps may say where Prometheus reads it (ARGV[1]), which is believed for ten seconds.
-- What cannot be read of a worker is forgotten, too.
for _, worker_id in ipairs(live_workers()) do
  if not is_intact(worker_id) then
    mended(key('worker', worker_id))
    retire(worker_id)
  end
end
if ARGV[1] and ARGV[1] ~= '' then redis.call('SET', key('keeper'), ARGV[1], 'PX', 10000) end
return {
  num_leases_ended, num_reservations_ended, num_blocks_forgotten,
  redis.call('ZCARD', key('leases')), redis.call('ZCARD', key('reservations')),
}
