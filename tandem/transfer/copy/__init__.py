"""KV blocks to a payload and back, each copied and summed in one pass."""
