"""The decode room: KV blocks in, tokens out."""
