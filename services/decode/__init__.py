"""The decode service: KV blocks in, tokens out."""
