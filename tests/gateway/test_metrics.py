"""The ways that count as a fallback are those that were not wanted, never the cost model's own choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.gateway.__main__ import make_gateway
from services.gateway.admission import PriorityClass
from services.gateway.generation import WORKER_LOST
from services.gateway.settings import CLASSES, ClassSettings, Disaggregation
from services.gateway.telemetry.metrics import FrontMetrics, Metrics
from services.gateway.telemetry.tenants import RequestEnd
from tandem.catalogue.metrics import GATEWAY
from tandem.local import RedisServer
from tandem.registry import Fallback
from tandem.v1 import llm_pb2
from tests.gateway.conftest import eventually, make_settings
from tests.gateway.peers import MODEL, Peers

REMOTE, LOCAL = llm_pb2.Path.KIND_REMOTE_PREFILL, llm_pb2.Path.KIND_LOCAL_PREFILL
# Long enough that the prefill worker is the cheaper reader.
LONG = {"model": MODEL, "prompt": "0123456789" * 20, "seed": 0, "max_tokens": 8}


@pytest.mark.parametrize("kind", [REMOTE, LOCAL])
@pytest.mark.parametrize("label", ["", WORKER_LOST, Fallback.NO_PROVEN_LINK])
def test_a_way_that_was_not_wanted_counts(kind: llm_pb2.Path.Kind, label: str) -> None:
    metrics = FrontMetrics().of("m")
    metrics.path(llm_pb2.Path(kind=kind), label)
    path = "local" if kind == LOCAL else "remote"
    expected = [f'tandem_fallbacks_total{{path="{path}",reason="{label}"}} 1.0'] if label else []
    assert fallbacks(said_by(metrics)) == expected


def test_times_between_tokens_fall_into_the_buckets_that_they_reach() -> None:
    metrics = FrontMetrics().of("m")
    times = iter((0.0, 1.0, 1.0, 1.025, 61.025))
    meter = metrics.choice(lambda: next(times))
    for num_tokens in (1, 4, 1, 1):  # the first has none before it; four at once; 25 ms; a minute
        meter.count(num_tokens)
    said = dict(line.rsplit(" ", 1) for line in said_by(metrics).splitlines() if "latency" in line)
    name = "vllm:inter_token_latency_seconds"
    reached = [said[f'{name}_bucket{{le="{bound}",model_name="m"}}'] for bound in ("0.001", "0.01", "0.025", "10.0")]
    assert reached == ["1.0", "1.0", "2.0", "2.0"]
    assert said[f'{name}_bucket{{le="+Inf",model_name="m"}}'] == said[f'{name}_count{{model_name="m"}}'] == "3.0"
    assert float(said[f'{name}_sum{{model_name="m"}}']) == pytest.approx(60.025)
    assert 'vllm:generation_tokens_total{model_name="m"} 7.0' in said_by(metrics)


def test_times_and_lengths_of_choices_that_ended_well() -> None:
    metrics = FrontMetrics().of("m")
    times = iter((10.0, 13.0, 13.5, 15.0, 15.25))
    good = metrics.choice(lambda: next(times))
    for num_tokens in (1, 2, 3):
        good.count(num_tokens)
    good.success("stop", prompt_tokens=300, cached_tokens=100, queued_s=1.0)
    lost = metrics.choice(iter((0.0, 40.0)).__next__)
    lost.count(1)
    lost.close()  # without success: it moves none of these
    said = sums(metrics)
    assert said["vllm:request_prefill_time_seconds"] == (1, 2.0)  # three seconds, one of them in the queue
    assert said["vllm:request_decode_time_seconds"] == (1, 2.0)
    assert said["vllm:request_time_per_output_token_seconds"] == (1, 0.4)
    assert said["vllm:e2e_request_latency_seconds"] == (1, 5.25)
    assert said["vllm:request_inference_time_seconds"] == (1, 4.25)
    assert said["vllm:request_prompt_tokens"] == (1, 300)
    assert said["vllm:request_prefill_kv_computed_tokens"] == (1, 200)
    assert said["vllm:request_generation_tokens"] == (1, 6)
    assert said["vllm:time_to_first_token_seconds"] == (2, 43.0)


def test_a_first_token_just_before_a_deadline_is_told_from_a_later_one() -> None:
    metrics = FrontMetrics().of("m")
    for seconds in (599.0, 601.0):
        metrics.choice(iter((0.0, seconds)).__next__).count(1)
    assert 'vllm:time_to_first_token_seconds_bucket{le="600.0",model_name="m"} 1.0' in said_by(metrics)


async def test_a_gateway_exposes_the_catalogue_and_nothing_else(auto: httpx.AsyncClient) -> None:
    text = (await auto.get("/metrics")).text
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name for name in exposed if not name.endswith("_created")} == {one.exposed_as for one in GATEWAY.values()}


async def test_what_there_is_to_scrape(auto: httpx.AsyncClient, peers: Peers) -> None:
    await peers.registry.sweep("10.0.0.9:9090")
    other = replace(peers.workers["d"].info, worker_id="d2", incarnation="new", metrics_address="10.0.0.2:9090")
    await peers.registry.leases.register(other, peers._load(), 60)
    own = str(auto.base_url).removeprefix("http://")
    expected = [
        {"targets": [own], "labels": {"component": "gateway"}},
        {"targets": ["10.0.0.2:9090"], "labels": {"component": "decode", "worker": "d2"}},
        {"targets": ["10.0.0.9:9090"], "labels": {"component": "kvstore"}},
    ]
    async with asyncio.timeout(30):
        while (await auto.get("/metrics/targets")).json() != expected:
            await asyncio.sleep(0.05)


@pytest.fixture
async def auto(model_folder: Path, redis: RedisServer, peers: Peers) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that chooses by cost."""
    settings = make_settings(redis, disaggregation=Disaggregation.AUTO)
    await peers.move_to(redis, settings.namespace)
    base = f"http://127.0.0.1:{settings.http_port}"
    async with make_gateway(settings) as gateway, httpx.AsyncClient(base_url=base, timeout=60) as client:
        await eventually(lambda: gateway.readiness()[1]["linked_pairs"] == 1)
        yield client


async def test_auto_that_gets_its_way_is_no_fallback(auto: httpx.AsyncClient) -> None:
    assert await ways(auto, LONG, {**LONG, "prompt": "once"}) == ["remote", "local"]
    assert fallbacks((await auto.get("/metrics")).text) == []


async def test_auto_that_wanted_a_prefill_worker_and_got_none_is_one(auto: httpx.AsyncClient, peers: Peers) -> None:
    peers.prefill.refuse = grpc.StatusCode.UNAVAILABLE
    assert await ways(auto, LONG) == ["local"]
    await peers.workers["p"].die()
    await peers.registry.leases.deregister("p", peers.workers["p"].info.incarnation)
    assert await ways(auto, LONG) == ["local"]
    assert fallbacks((await auto.get("/metrics")).text) == [
        'tandem_fallbacks_total{path="local",reason="worker_lost"} 1.0',
        'tandem_fallbacks_total{path="local",reason="no_live_worker"} 1.0',
    ]


async def ways(client: httpx.AsyncClient, *bodies: dict[str, object]) -> list[str]:
    return [(await client.post("/v1/completions", json=body)).headers["x-tandem-path"] for body in bodies]


async def test_errors_count_by_their_code(auto: httpx.AsyncClient) -> None:
    await auto.post("/v1/completions", json={**LONG, "max_tokens": 10**6})
    assert (await auto.post("/v1/completions", json={**LONG, "max_tokens": "x"})).status_code == 400
    assert (await auto.post("/v1/completions", json=LONG)).status_code == 200
    lines = (await auto.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith("tandem_errors_total{")]
    assert sorted(found) == [
        'tandem_errors_total{reason="context_length_exceeded",status="400"} 1.0',
        'tandem_errors_total{reason="invalid_type",status="400"} 1.0',
    ]
    assert 'tandem_route_seconds_count{model_name="tiny"} 1.0' in lines
    assert 'vllm:request_params_n_sum{model_name="tiny"} 1.0' in lines
    assert 'vllm:request_params_max_tokens_sum{model_name="tiny"} 8.0' in lines


REALTIME = {"realtime": ClassSettings(ttft_s=1.0, itl_s=0.1, objective=0.9)}
TARGETS = {**CLASSES, **REALTIME}


@pytest.mark.parametrize(
    ("outcome", "changes"),
    [
        ("met", {}),
        ("met", {"ttft_s": 1.0, "itl_s": 0.1}),
        ("met", {"ttft_s": None, "itl_s": None}),
        ("late_first", {"ttft_s": 1.1}),
        ("slow", {"itl_s": 0.11}),
        ("met", {"priority_class": PriorityClass.BATCH, "ttft_s": 100.0, "itl_s": 9.0}),  # which has no targets
        ("refused", {"status": 429}),
        ("failed", {"status": 503}),
        ("", {"status": 400}),
        ("", {"status": 499}),
    ],
)
def test_a_request_meets_its_classs_targets_or_not(outcome: str, changes: dict[str, Any]) -> None:
    metrics = FrontMetrics(TARGETS).of("m")
    end = RequestEnd("t", PriorityClass.REALTIME, 200, 0.5, 0.05, 100, 40, 8)
    metrics.tenants.ended(end := replace(end, **changes))
    lines = said_by(metrics).splitlines()
    found = [line for line in lines if line.startswith("tandem_slo_requests_total{")]
    said = f'model_name="m",outcome="{outcome}",priority_class="{end.priority_class.label}",tenant="t"'
    assert found == ([f"tandem_slo_requests_total{{{said}}} 1.0"] if outcome else [])
    goodput = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("tandem_goodput_tokens_total{")]
    assert goodput == (["8.0"] if outcome == "met" else [])
    counted = [line for line in lines if line.startswith("tandem_tenant_tokens_total{")]
    tokens = {line.split('kind="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in counted}
    assert tokens == {"computed": 60, "cached": 40, "generated": 8}
    assert 'tandem_slo_objective{model_name="m",priority_class="realtime"} 0.9' in lines


@pytest.mark.parametrize("ttft_s", [0.3, None], ids=["answered", "no token came"])
def test_a_tenant_s_first_tokens_are_timed_where_they_came(ttft_s: float | None) -> None:
    metrics = FrontMetrics(TARGETS).of("m")
    metrics.tenants.ended(RequestEnd("t", PriorityClass.REALTIME, 200, ttft_s))
    metrics.tenants.ended(RequestEnd("other", PriorityClass.REALTIME, 200, 9.0))
    said = '{model_name="m",priority_class="realtime",tenant="t"}'
    found = [line for line in said_by(metrics).splitlines() if said in line and "_created" not in line]
    expected = [f"tandem_tenant_ttft_seconds_{part}{said} {value}" for part, value in (("count", 1.0), ("sum", 0.3))]
    assert [line for line in found if "tandem_tenant_ttft_seconds" in line] == (expected if ttft_s else [])


def test_tenants_beyond_the_most_share_one_name() -> None:
    metrics = FrontMetrics(max_tenants=2).of("m")
    for tenant in ("a", "b", "c", "d", "a"):
        metrics.tenants.ended(RequestEnd(tenant, PriorityClass.BATCH, 200))
    found = [line for line in said_by(metrics).splitlines() if line.startswith("tandem_slo_requests_total{")]
    counts = {line.split('tenant="')[1].split('"')[0]: line.rsplit(" ", 1)[1] for line in found}
    assert counts == {"a": "2.0", "b": "1.0", "other": "2.0"}


def test_exemplars_lead_from_slow_buckets_to_traces_in_openmetrics_alone() -> None:
    metrics = FrontMetrics().of("m")
    metrics.choice(iter((0.0, 3.0)).__next__, "ab" * 16).count(1)
    metrics.choice(iter((0.0, 30.0)).__next__).count(1)
    text, content_type = metrics._front.exposition("application/openmetrics-text; version=1.0.0")
    marked = [line for line in text.decode().splitlines() if " # {" in line]
    assert content_type.startswith("application/openmetrics-text")
    assert len(marked) == 1
    assert marked[0].startswith('vllm:time_to_first_token_seconds_bucket{le="5.0"')
    assert f'# {{trace_id="{"ab" * 16}"}} 3.0' in marked[0]
    assert " # {" not in said_by(metrics)


async def test_workers_that_come_count_as_starts_once(auto: httpx.AsyncClient, peers: Peers) -> None:
    async def said() -> dict[str, float]:
        lines = (await auto.get("/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    names = "worker_starts_total", "live_workers"
    starts, live = (f'tandem_{name}{{model_name="tiny",role="decode"}}' for name in names)
    first = await said()
    assert (first[starts], first[live], first["tandem_registry_reached"]) == (0, 1, 1)
    info = replace(peers.workers["d"].info, worker_id="d2", incarnation="new")
    await peers.registry.leases.register(info, peers._load(), 60)
    async with asyncio.timeout(30):
        while (await said())[live] != 2:
            await asyncio.sleep(0.05)
    assert (await said())[starts] == 1


def said_by(metrics: Metrics) -> str:
    return metrics._front.exposition()[0].decode()


def sums(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """The number of observations and their sum, for each histogram."""
    said = dict(line.rsplit(" ", 1) for line in said_by(metrics).splitlines())
    label = '{model_name="m"}'
    names = [name.removesuffix(f"_count{label}") for name in said if name.endswith(f"_count{label}")]
    return {name: (float(said[f"{name}_count{label}"]), float(said[f"{name}_sum{label}"])) for name in names}


def fallbacks(exposition: str) -> list[str]:
    return [line for line in exposition.splitlines() if line.startswith("tandem_fallbacks_total{")]
