"""Copying KV blocks to a payload and back; a pass both copies and sums the bytes."""
