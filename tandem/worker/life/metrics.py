"""A worker's load for Prometheus, and so for autoscalers: waiting prompts for prefill, blocks for decode.

The values are read from the engine's last statistics when Prometheus scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.registry import Collector

from tandem.catalogue.metrics import WORKER
from tandem.engine import EngineStats
from tandem.tiers import TierStats
from tandem.worker.engine import StepCounts


class WorkerCollector(Collector):
    def __init__(
        self,
        stats: Callable[[], EngineStats],
        steps: StepCounts,
        num_adapters: Callable[[], int],
        labels: Sequence[str],
        tiers: Callable[[], Mapping[str, TierStats]],
        cold_start: Callable[[], Mapping[str, float]],
    ) -> None:
        """`labels`: the values of WORKER_LABELS; `cold_start`: seconds of each phase."""
        self._stats, self._steps, self._num_adapters, self._labels = stats, steps, num_adapters, labels
        self._tiers, self._cold_start = tiers, cold_start

    def collect(self) -> Iterator[Metric]:
        values = {**_values(self._stats()), "tandem_adapters": self._num_adapters()}
        for name, value in values.items():
            family = WORKER[name].family()
            family.add_metric(self._labels, value)
            yield family
        family = WORKER["tandem_cold_start_seconds"].family()
        for part, seconds in self._cold_start().items():
            family.add_metric([*self._labels, part], seconds)
        yield family
        yield from self._of_tiers()
        yield from self._steps.families(self._labels)

    def _of_tiers(self) -> Iterator[Metric]:
        tiers = {tier: _of_tier(stats) for tier, stats in self._tiers().items()}
        for name in _of_tier(TierStats()):
            family = WORKER[name].family()
            for tier, values in tiers.items():
                family.add_metric([*self._labels, tier], values[name])
            yield family


def _of_tier(stats: TierStats) -> dict[str, float]:
    return {
        "tandem_kv_tier_up": stats.up,
        "tandem_kv_tier_blocks": stats.held,
        "tandem_kv_tier_written_blocks": stats.written,
        "tandem_kv_tier_restored_blocks": stats.restored,
        "tandem_kv_tier_damaged_blocks": stats.damaged,
    }


def _values(stats: EngineStats) -> dict[str, float]:
    return {
        "tandem_queued_tokens": stats.queued_tokens,
        "tandem_running_sequences": stats.num_running + stats.num_waiting,
        "tandem_kv_blocks": stats.num_blocks,
        "tandem_kv_usage": (stats.num_blocks - stats.free_blocks) / stats.num_blocks,
        "tandem_read_tokens": stats.num_prefilled_tokens,
        "tandem_written_tokens": stats.num_written_tokens,
        "tandem_proposed_tokens": stats.num_proposed_tokens,
        "tandem_accepted_tokens": stats.num_accepted_tokens,
        "vllm:num_preemptions": stats.num_preempted,
        "tandem_swapped_preemptions": stats.num_swapped,
        "tandem_aborted_sequences": stats.num_aborted,
        "tandem_aborted_blocks": stats.num_aborted_blocks,
        "tandem_evicted_blocks": stats.num_evicted_blocks,
    }
