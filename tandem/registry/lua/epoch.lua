-- What a script begins with that holds something for a request. ARGV: the epoch for which it was asked, which is taken
-- away here, and the script's own. In another epoch nothing is done. Returns the epoch there is, and then the answer.
local epoch = known_epoch()
if table.remove(ARGV, 1) ~= epoch then return {epoch} end
