"""Links at work: what has threads and locks, around the protocol. `threads` or `loop` drives it."""
