-- ARGV: block hashes. Returns for each hash the ids of the live workers that hold the block.
local holders = {}
for i = 1, #ARGV do holders[i] = {} end
for _, worker_id in ipairs(live_workers()) do
  in_chunks(1, #ARGV, function(first, last)
    local found = redis.call('SMISMEMBER', key('blocks', worker_id), unpack(ARGV, first, last))
    for i, held in ipairs(found) do
      if held == 1 then table.insert(holders[first + i - 1], worker_id) end
    end
  end)
end
return holders
