"""The settings of a prefill worker."""

from __future__ import annotations

from tandem.worker import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A Tandem prefill worker: prefills prompts and pushes their KV blocks to decode workers."""
