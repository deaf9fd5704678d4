"""Histograms of the tokens and the sequences of an engine's steps, and where its time goes, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import Metric

from tandem.catalogue.metrics import WORKER
from tandem.catalogue.tally import BucketCounts


class StepCounts:
    """Counts steps; `add` is called by the thread that steps, `moving` by any. `now` returns the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._step_s = self._moving_s = 0.0
        self._tokens = BucketCounts(WORKER["vllm:iteration_tokens_total"])
        self._sequences = BucketCounts(WORKER["tandem_batch_sequences"])

    def add(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        self._step_s += seconds
        self._tokens.observe(num_tokens)
        self._sequences.observe(num_sequences)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Counts the time within, in which a step may have to wait, as that of blocks that move."""
        started = self._now()
        try:
            yield
        finally:
            with self._lock:
                self._moving_s += self._now() - started

    def families(self, labels: Sequence[str]) -> Iterator[Metric]:
        yield self._tokens.family(labels)
        yield self._sequences.family(labels)
        for name, seconds in (("tandem_step_seconds", self._step_s), ("tandem_moving_seconds", self._moving_s)):
            family = WORKER[name].family()
            family.add_metric(labels, seconds)
            yield family
