from __future__ import annotations

from dataclasses import fields

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.catalogue.metrics import WORKER, WORKER_LABELS
from tandem.engine import EngineStats
from tandem.process import IntegrityReport, metrics_server
from tandem.tiers import TierStats
from tandem.worker.engine import StepCounts
from tandem.worker.life.metrics import WorkerCollector

LABELS = ("m", "decode", "d0")


def stats(**changes: int) -> EngineStats:
    known = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
    known |= {"num_waiting": 2, "num_running": 3, "free_blocks": 6, "num_blocks": 8, "queued_tokens": 77}
    known |= {"num_prefilled_tokens": 1000, "num_written_tokens": 500, "num_preempted": 7, "num_swapped": 4}
    known |= {"num_aborted": 3, "num_aborted_blocks": 12, "num_evicted_blocks": 5}
    known |= {"num_proposed_tokens": 9, "num_accepted_tokens": 8}
    return EngineStats(**(known | changes))


def read(host: str, port: int) -> dict[str, float]:
    text = httpx.get(f"http://{host}:{port}/metrics").text
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(zip(WORKER_LABELS, LABELS, strict=True)))
    lines = (line.split() for line in text.splitlines() if not line.startswith("#") and "_bucket{" not in line)
    of_tier = labels.replace(",worker=", ',tier="disk",worker=')
    of_part = labels.replace(",role=", ',part="weights",role=')
    both = {f"{{{one}}}" for one in (of_tier, of_part)}
    said = {name.replace(f"{{{labels}}}", ""): float(value) for name, value in lines}
    for one in both:
        said = {name.replace(one, ""): value for name, value in said.items()}
    return {name.removesuffix("_sum"): value for name, value in said.items() if not name.endswith("_count")}


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_prometheus_reads_what_the_engine_last_said(host: str, url: str) -> None:
    now = [stats()]
    registry = CollectorRegistry()
    steps = StepCounts(iter((1.0, 1.5)).__next__)
    steps.add(48, 3, 2.5)
    with steps.moving():
        pass
    tiers = {"disk": TierStats(9, 12, 3, 1, 1)}
    registry.register(WorkerCollector(lambda: now[0], steps, lambda: 2, LABELS, lambda: tiers, lambda: {"weights": 7}))
    with metrics_server.serving(registry, lambda: IntegrityReport({"blocks": 2}, ("r1: lost",)), host, 0) as port:
        assert set(read(url, port)) == {series.exposed_as for series in WORKER.values()}
        assert read(url, port) == {
            "tandem_moving_seconds_total": 0.5,
            "tandem_step_seconds_total": 2.5,
            "tandem_queued_tokens": 77, "tandem_running_sequences": 5, "tandem_kv_blocks": 8, "tandem_kv_usage": 0.25,
            "tandem_read_tokens_total": 1000, "tandem_written_tokens_total": 500, "vllm:num_preemptions_total": 7,
            "tandem_swapped_preemptions_total": 4, "tandem_aborted_sequences_total": 3,
            "tandem_aborted_blocks_total": 12, "tandem_proposed_tokens_total": 9, "tandem_accepted_tokens_total": 8,
            "tandem_evicted_blocks_total": 5, "tandem_adapters": 2, "vllm:iteration_tokens_total": 48,
            "tandem_batch_sequences": 3, "tandem_kv_tier_up": 1, "tandem_kv_tier_blocks": 9,
            "tandem_kv_tier_written_blocks_total": 12, "tandem_kv_tier_restored_blocks_total": 3,
            "tandem_kv_tier_damaged_blocks_total": 1, "tandem_cold_start_seconds": 7,
        }  # fmt: skip
        now[0] = stats(free_blocks=0, queued_tokens=0)
        assert read(url, port)["tandem_kv_usage"] == 1
        assert read(url, port)["tandem_queued_tokens"] == 0
        held = httpx.get(f"http://{url}:{port}/debug/integrity").json()
        assert held == {"whole": False, "violations": ["r1: lost"], "held": {"blocks": 2}}
    with pytest.raises(httpx.ConnectError):
        read(url, port)
