-- Forgets what is past its time even where nothing else calls. Returns how many leases, reservations and block locations.
return {num_leases_ended, num_reservations_ended, num_blocks_forgotten}
