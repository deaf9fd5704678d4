"""The settings of a decode worker."""

from __future__ import annotations

from tandem.worker import WorkerSettings


class DecodeSettings(WorkerSettings):
    """A Tandem decode worker: receives KV blocks and writes the answers."""
