"""Dashboards, vLLM's and Tandem's own, filled by a running cluster: their queries, asked of a real Prometheus."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.local import free_ports
from tandem.process.child_process import dying_with_parent
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually

PROMETHEUS = shutil.which("prometheus") or ""
pytestmark = pytest.mark.skipif(not PROMETHEUS, reason="no prometheus on the PATH")
MODEL, RANGE = '{model_name="tandem-demo"}', "[10s]"


def quantiles(name: str) -> list[str]:
    """A latency panel: four quantiles and the mean."""
    buckets = f"sum by(le) (rate(vllm:{name}_bucket{MODEL}{RANGE}))"
    mean = f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"
    return [*(f"histogram_quantile({q}, {buckets})" for q in (0.99, 0.95, 0.9, 0.5)), mean]


def rate(name: str) -> str:
    return f"rate(vllm:{name}{MODEL}{RANGE})"


def growth(name: str, label: str) -> str:
    return f"sum by({label}) (increase(vllm:{name}{MODEL}{RANGE}))"


PANELS = {
    "E2E Request Latency": quantiles("e2e_request_latency_seconds"),
    "Token Throughput": [rate("prompt_tokens_total"), rate("generation_tokens_total")],
    "Inter Token Latency": quantiles("inter_token_latency_seconds"),
    "Scheduler State": [f"vllm:num_requests_running{MODEL}", f"vllm:num_requests_waiting{MODEL}"],
    "Time To First Token Latency": quantiles("time_to_first_token_seconds"),
    "Cache Utilization": [f"vllm:kv_cache_usage_perc{MODEL}"],
    "Request Prompt Length": [growth("request_prompt_tokens_bucket", "le")],
    "Request Generation Length": [growth("request_generation_tokens_bucket", "le")],
    "Finish Reason": [growth("request_success_total", "finished_reason")],
    "Queue Time": [rate("request_queue_time_seconds_sum")],
    "Requests Prefill and Decode Time": [
        rate("request_prefill_time_seconds_sum"), rate("request_decode_time_seconds_sum"),
    ],
    "Max Generation Token in Sequence Group": [rate("request_max_num_generation_tokens_sum")],
}  # fmt: skip
# Read at one moment, they may well be 0.
MOMENTARY = ("Scheduler State", "Cache Utilization")


@pytest.fixture(scope="module")
def prometheus(shm_cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. It scrapes all that the gateway knows of, twice a second."""
    tmp_path = tmp_path_factory.mktemp("prometheus")
    found = {"url": f"{shm_cluster.http}/metrics/targets", "refresh_interval": "1s"}
    jobs = [{"job_name": "tandem", "http_sd_configs": [found]}]
    (tmp_path / "prometheus.yml").write_text(
        json.dumps({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": jobs}),
        encoding="utf-8",
    )
    [port] = free_ports(1)
    command = dying_with_parent(
        PROMETHEUS, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip
    with (tmp_path / "prometheus.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: is_ready(f"http://127.0.0.1:{port}"), BOUND_S, "Prometheus listens")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(BOUND_S)


def is_ready(prometheus: str) -> bool:
    try:
        return httpx.get(f"{prometheus}/-/ready", timeout=BOUND_S).is_success
    except httpx.TransportError:
        return False


def series(prometheus: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=BOUND_S)
    found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]["result"]
    return found


def own_queries() -> dict[str, list[str]]:
    """Those of each panel of deploy/helm/dashboards."""
    found: dict[str, list[str]] = {}
    for path in sorted((Path(__file__).parents[2] / "deploy" / "helm" / "dashboards").glob("*.json")):
        page = json.loads(path.read_text(encoding="utf-8"))
        for panel in (panel for panel in page["panels"] if panel["type"] != "row"):
            asked = [target["expr"].replace("[$__rate_interval]", RANGE) for target in panel["targets"]]
            found[f"{page['title']}: {panel['title']}"] = asked
    return found


# What inference-perf asks of vLLM: quantiles and means of histograms, growth of counters, gauges. Some of its metrics
# vLLM itself has only with images, an external cache or sampled blocks, and Tandem has none of these.
HISTOGRAMS = (
    "e2e_request_latency_seconds", "request_time_per_output_token_seconds", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "iteration_tokens_total", "request_prefill_kv_computed_tokens",
)  # fmt: skip
COUNTERS = (
    "prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_hits",
    "prefix_cache_queries", "prompt_tokens_cached",
)  # fmt: skip
GAUGES = "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"


def inference_perf() -> dict[str, list[str]]:
    found = {name: [f"avg_over_time(vllm:{name}{MODEL}{RANGE})"] for name in GAUGES}
    found |= {name: [f"sum(increase(vllm:{name}_total{MODEL}{RANGE}))"] for name in COUNTERS}
    for name in HISTOGRAMS:
        rates = {end: f"sum(rate(vllm:{name}_{end}{MODEL}{RANGE}))" for end in ("sum", "count")}
        quantile = f"histogram_quantile(0.9, sum(rate(vllm:{name}_bucket{MODEL}{RANGE})) by (le))"
        found[name] = [f"{rates['sum']} / ({rates['count']} > 0)", quantile]
    return found


def values(prometheus: str, query: str) -> list[float]:
    return [float(one["value"][1]) for one in series(prometheus, query)]


def is_filled(prometheus: str, panel: str) -> bool:
    found = [values(prometheus, query) for query in PANELS[panel]]
    if panel in MOMENTARY:
        return all(map(len, found))
    return all(any(value > 0 and not math.isnan(value) for value in one) for one in found)


def has_data(prometheus: str, queries: list[str]) -> bool:
    """Numbers, 0 among them: a healthy cluster fails at nothing."""
    return all(any(not math.isnan(value) for value in values(prometheus, query)) for query in queries)


@pytest.mark.parametrize("asked", [own_queries(), inference_perf()], ids=["own dashboards", "inference-perf"])
def test_what_others_ask_has_an_answer(
    shm_cluster: RunningCluster, prometheus: str, asked: dict[str, list[str]]
) -> None:
    body = {"model": "tandem-demo", "prompt": "Once upon a time, there was" * 4, "max_tokens": 8, "ignore_eos": True}
    empty = set(asked)

    def answered() -> bool:
        httpx.post(f"{shm_cluster.http}/v1/completions", json=body, timeout=BOUND_S).raise_for_status()
        empty.difference_update([name for name in sorted(empty) if has_data(prometheus, asked[name])])
        return not empty

    try:
        eventually(answered, BOUND_S, "every query has an answer")
    except AssertionError:
        pytest.fail(f"empty: {sorted(empty)}")


def test_each_process_of_a_cluster_is_found_and_scraped(prometheus: str) -> None:
    def up() -> bool:
        try:
            found = series(prometheus, "up")
        except httpx.TransportError:
            return False
        return {one["metric"]["component"]: one["value"][1] for one in found} == dict.fromkeys(
            ("gateway", "prefill", "decode", "kvstore"), "1"
        )

    eventually(up, BOUND_S, "Prometheus scrapes them all")


def test_every_panel_of_vllms_dashboard_is_filled(shm_cluster: RunningCluster, prometheus: str) -> None:
    body = {"model": "tandem-demo", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    empty = set(PANELS)

    def filled() -> bool:
        httpx.post(f"{shm_cluster.http}/v1/completions", json=body, timeout=BOUND_S).raise_for_status()
        empty.difference_update([panel for panel in sorted(empty) if is_filled(prometheus, panel)])
        return not empty

    try:
        eventually(filled, BOUND_S, "every panel is filled")
    except AssertionError:
        pytest.fail(f"empty: {sorted(empty)}")
