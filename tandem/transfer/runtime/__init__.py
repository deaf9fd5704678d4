"""Running links: the threads and locks around the protocol. `threads` or `loop` drives a link."""
