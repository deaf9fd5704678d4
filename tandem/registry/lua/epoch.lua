-- The beginning of scripts that reserve something for a request. ARGV: the epoch for which the call was made, which is
-- removed here, and the script's own. In another epoch the script does nothing. Returns the present epoch, then the
-- answer.
local epoch = known_epoch()
if table.remove(ARGV, 1) ~= epoch then return {epoch} end
