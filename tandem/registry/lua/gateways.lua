-- Returns what each gateway whose lease lives has said of itself.
return redis.call('HVALS', key('gateways'))
