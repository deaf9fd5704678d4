-- Returns the addresses of each gateway with a live lease, and where Prometheus scrapes the kvstore, if it is known.
return {redis.call('HVALS', key('gateways')), redis.call('GET', key('keeper')) or ''}
