"""Histograms of the tokens and the sequences of an engine's steps, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Metric

from tandem.catalogue.metrics import WORKER
from tandem.catalogue.tally import BucketCounts


class StepCounts:
    """Counts steps; to be called by the thread that steps."""

    def __init__(self) -> None:
        self._tokens = BucketCounts(WORKER["vllm:iteration_tokens_total"])
        self._sequences = BucketCounts(WORKER["tandem_batch_sequences"])

    def add(self, num_tokens: int, num_sequences: int) -> None:
        self._tokens.observe(num_tokens)
        self._sequences.observe(num_sequences)

    def families(self, labels: Sequence[str]) -> Iterator[Metric]:
        yield self._tokens.family(labels)
        yield self._sequences.family(labels)
