-- Returns the id of the last event, then worker id, generation and number of its last batch of every live worker.
local last = redis.call('XREVRANGE', key('events'), '+', '-', 'COUNT', 1)
local heads = {last[1] and last[1][1] or '0-0'}
for _, worker_id in ipairs(live_workers()) do
  local head = redis.call('HMGET', key('worker', worker_id), 'generation', 'block_batches')
  if whole(head[1]) and whole(head[2]) then
    for _, text in ipairs({worker_id, head[1], head[2]}) do heads[#heads + 1] = text end
  end
end
return heads
