-- Returns what each gateway whose lease lives has said of itself, and where Prometheus reads the kvstore, if it is known.
return {redis.call('HVALS', key('gateways')), redis.call('GET', key('keeper')) or ''}
