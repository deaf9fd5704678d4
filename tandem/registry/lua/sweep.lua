-- Forgets what is past its time even where nothing else calls. Returns how many leases, reservations and block locations
-- that were, and how many leases and reservations there are.
-- Who sweeps may say where Prometheus reads it (ARGV[1]), which is believed for ten seconds.
if ARGV[1] and ARGV[1] ~= '' then redis.call('SET', key('keeper'), ARGV[1], 'PX', 10000) end
return {
  num_leases_ended, num_reservations_ended, num_blocks_forgotten,
  redis.call('ZCARD', key('leases')), redis.call('ZCARD', key('reservations')),
}
