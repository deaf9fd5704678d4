-- Forgets what is past its time even where nobody asks. Returns how many leases, reservations and block locations.
local _, leases, reservations, blocks = expire_due()
return {leases, reservations, blocks}
