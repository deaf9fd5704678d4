"""A gateway's memory of recent requests: each tenant's its own, as rows of a waterfall."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway import GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.telemetry.recent import _spans_of
from services.gateway.telemetry.rows import rows_of
from tandem.process import telemetry
from tandem.security import ApiKey, Keys, write_keys
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 3}


@pytest.fixture
def recent(exporter: InMemorySpanExporter) -> Iterator[telemetry.RecentSpans]:
    """Those that this process ends from now on."""
    provider, recent = trace.get_tracer_provider(), telemetry.RecentSpans()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(recent)
    yield recent
    recent.on_end = lambda span: None  # type: ignore[method-assign]


@pytest.fixture
async def remembering(
    settings: GatewaySettings, peers: Peers, recent: telemetry.RecentSpans
) -> AsyncIterator[httpx.AsyncClient]:
    async with make_gateway(settings, recent) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as client:
            yield client


def bars(found: dict[str, Any]) -> list[str]:
    return [bar["name"] for row in found["rows"] for bar in row["bars"]]


async def test_a_request_is_found_by_its_id(remembering: httpx.AsyncClient) -> None:
    await remembering.post("/v1/completions", json=BODY, headers={"x-request-id": "a/b"})
    await remembering.post("/v1/completions", json=BODY, headers={"x-request-id": "other"})
    found = (await remembering.get("/debug/traces/a%2Fb")).raise_for_status().json()
    assert sorted(bars(found)) == ["decode", "prefill", "queue", "reserve", "route", f"text_completion {MODEL}"]
    assert found["missing"] == ["d", "p"]  # these peers remember nothing
    assert all(bar["took"] >= 0 for row in found["rows"] for bar in row["bars"])
    assert [row["name"] for row in found["rows"] if row["marks"]] == ["first_token"]


async def test_a_request_that_is_not_remembered_is_not_found(remembering: httpx.AsyncClient) -> None:
    answer = await remembering.get("/debug/traces/never")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_request_that_was_refused_is_found_too(remembering: httpx.AsyncClient) -> None:
    await remembering.post("/v1/completions", json={**BODY, "n": -1}, headers={"x-request-id": "bad"})
    assert bars((await remembering.get("/debug/traces/bad")).json()) == ["refused"]


def key_ring(path: Path, *names: str) -> dict[str, dict[str, str]]:
    """Headers of each tenant's key; that of `admin` manages models."""
    ids = {name: f"{number:08x}" for number, name in enumerate(names)}
    keys = (
        ApiKey(id=ids[name], sha256=sha256(name.encode()).hexdigest(), tenant=name, manages_models=name == "admin")
        for name in names
    )
    write_keys(path, Keys(keys=tuple(keys)))
    return {name: {"authorization": f"Bearer tk-{ids[name]}-{name}"} for name in names}


async def test_a_tenant_finds_its_own_alone_whatever_ids_were_chosen(
    settings: GatewaySettings, peers: Peers, recent: telemetry.RecentSpans, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    said = key_ring(file, "acme", "other", "admin")
    shared = {"x-request-id": "same", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    async with (
        make_gateway(settings.model_copy(update={"api_keys": file}), recent) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http,
    ):
        await eventually(lambda: gateway.readiness()[0])
        await http.post("/v1/completions", json=BODY, headers={**said["acme"], **shared})
        assert (await http.get("/debug/traces/same")).status_code == 401
        assert (await http.get("/debug/traces/same", headers=said["other"])).status_code == 404
        await http.post("/v1/completions", json=BODY, headers={**said["other"], **shared})
        for name, owner in (("acme", "acme"), ("other", "other"), ("admin", "other")):
            found = (await http.get("/debug/traces/same", headers=said[name])).json()
            assert len(bars(found)) == 6, name
            tenants = {bar["args"].get("tandem.tenant") for row in found["rows"] for bar in row["bars"]}
            assert tenants - {None} == {owner}


def test_attributes_of_every_kind_become_json(recent: telemetry.RecentSpans) -> None:
    said = {"s": "x", "i": 1, "d": 0.5, "b": True, "l": ["x", "y"]}
    with trace.get_tracer("t").start_as_current_span("root", attributes=said) as span:
        pass
    (row,) = json.loads(json.dumps(rows_of(_spans_of(recent.encoded(span.get_span_context().trace_id)))))
    assert row["bars"][0]["args"].items() >= said.items()
