"""What a decode worker can be told."""

from __future__ import annotations

from tandem.worker import WorkerSettings


class DecodeSettings(WorkerSettings):
    """A Tandem decode worker: receives KV blocks and writes the answers."""
