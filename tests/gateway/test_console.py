"""The console's page and feed: bounded, everything for those who manage models, for others what is their own."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.console import console as console_module
from services.gateway.console import history, links
from services.gateway.console.history import quantile
from services.gateway.console.routes import FOLDER
from services.gateway.directory import readiness
from services.gateway.telemetry import RequestRecords
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_recent_traces import key_ring

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 3, "user": "acme"}
STATIC = sorted(str(path.relative_to(str(FOLDER))) for path in Path(str(FOLDER)).rglob("*") if path.is_file())


async def feed_of(http: httpx.AsyncClient, **said: Any) -> dict[str, Any]:
    return (await http.get("/console/feed", **said)).raise_for_status().json()


async def test_the_page_loads_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/console")
    policy = page.headers["content-security-policy"]
    inline = re.search(r'<script type="importmap">(.*?)</script>', page.text)
    assert inline
    assert f"'sha256-{b64encode(sha256(inline[1].encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    links = re.findall(r'(?:href|src)="([^"]*)"|": "\./([^"]*)"', page.text)
    for link in filter(None, (name for pair in links for name in pair)):
        assert link.startswith("console/files/")
        assert (await http.get(link)).status_code == 200, link


@pytest.mark.parametrize("name", STATIC)
def test_files_name_no_host_but_in_comments(name: str) -> None:
    text = (Path(str(FOLDER)) / name).read_text(encoding="utf-8")
    code = re.sub(r"/\*.*?\*/|^\s*//.*$", "", text, flags=re.DOTALL | re.MULTILINE)
    hosts = set(re.findall(r"https?://([\w.-]+)", code)) - {"www.w3.org"}  # names of XML's kinds
    assert "LICENSE" in name or not hosts


@pytest.mark.parametrize("name", [name for name in STATIC if "vendor" not in name])
def test_links_are_relative_so_that_they_hold_behind_a_proxy_s_path(name: str) -> None:
    assert not re.search(r'["`(=]/(v1|console|debug)', (Path(str(FOLDER)) / name).read_text(encoding="utf-8"))


async def test_scripts_come_as_scripts(http: httpx.AsyncClient) -> None:
    for name in ("main.js", "vendor/preact.mjs", "vendor/uPlot.esm.js"):
        assert (await http.get(f"/console/files/{name}")).headers["content-type"].startswith("text/javascript")
    assert (await http.get("/console/files/../console.py")).status_code == 404
    assert (await http.get("/console/files/%2e%2e/console.py")).status_code == 404


async def test_the_feed_tells_of_workers_queue_and_requests(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    await http.post("/v1/completions", json={**BODY, "n": -1}, headers={"x-request-id": "bad"})
    told = await feed_of(http)
    assert (told["all"], told["gateway"]["ready"], told["num_workers"]) == (True, True, 2)
    assert [(worker["id"], worker["role"], worker["state"]) for worker in told["workers"]] == [
        ("d", "decode", "serving"), ("p", "prefill", "serving"),
    ]  # fmt: skip
    assert all(worker["incarnation"] for worker in told["workers"])
    refused, ended = told["requests"]
    assert (refused["request_id"], refused["status"]) == ("bad", 400)
    assert (ended["request_id"], ended["tenant"], ended["output_tokens"]) == ("mine", "acme", 3)
    assert (told["queue"], told["running"]) == ([], [])


@asynccontextmanager
async def held_back(peers: Peers, http: httpx.AsyncClient, **said: Any) -> AsyncIterator[None]:
    """Inside, a request is being prefilled."""
    peers.prefill.hold.clear()
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY, **said))
    await eventually(lambda: bool(peers.prefill.seen))
    yield
    peers.prefill.hold.set()
    await asking


async def test_what_runs_is_told_by_class_and_tenant(http: httpx.AsyncClient, peers: Peers) -> None:
    async with held_back(peers, http):
        told = await feed_of(http)
    assert [(line["class"], line["tenant"], line["inside"]) for line in told["queue"]] == [("interactive", "acme", 1)]
    (one,) = told["running"]
    assert (one["phase"], one["tenant"], one["decode_worker"], one["tokens"]) == ("prefill", "acme", "d", 0)


async def test_links_are_as_their_prefill_workers_say(http: httpx.AsyncClient) -> None:
    links: list[dict[str, Any]] = []

    async def known() -> bool:
        links[:] = (await feed_of(http))["links"]
        return bool(links)

    await eventually(known)
    (link,) = links
    assert link.items() >= {"prefill": "p", "decode": "d", "up": True, "transport": "tcp", "bytes_per_s": 2000}.items()


async def test_charts_follow_what_happens_and_only_news_is_sent(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY_S", 0.1)
    for _ in range(3):
        await http.post("/v1/completions", json=BODY)
    points: list[dict[str, Any]] = []

    async def grown() -> bool:
        points[:] = (await feed_of(http))["history"]
        return sum(point["requests_per_s"] > 0 for point in points) > 0

    await eventually(grown)
    busy = next(point for point in points if point["requests_per_s"])
    assert busy["tokens_per_s"] > 0
    assert busy["goodput_per_s"] > 0
    assert busy["met"] == 1.0
    assert 0 < busy["ttft_p50"] <= busy["ttft_p95"]
    first = await feed_of(http)
    at = {"gateway": first["id"], "after": str(first["history"][-1]["t"])}
    news = (await feed_of(http, params=at))["history"]
    assert all(point["t"] > first["history"][-1]["t"] for point in news)
    other = await feed_of(http, params={**at, "gateway": "another"})
    assert len(other["history"]) >= len(first["history"])


@pytest.mark.parametrize("after", ["soon", "nan", "inf", "1e999", "\0"])
async def test_a_time_that_is_none_is_refused_by_name(http: httpx.AsyncClient, after: str) -> None:
    answer = await http.get("/console/feed", params={"after": after})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_many_who_look_cost_as_one(
    http: httpx.AsyncClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "AGAIN_S", 60.0)
    monkeypatch.setattr(links, "EVERY_S", 60.0)
    built, asked = [], []
    of_model, ask = readiness.of_model, links.LinkBook._ask

    def count_built(llm: Any) -> Any:
        built.append(0)
        return of_model(llm)

    def count_asked(book: Any) -> Any:
        asked.append(0)
        return ask(book)

    monkeypatch.setattr(readiness, "of_model", count_built)
    monkeypatch.setattr(links.LinkBook, "_ask", count_asked)
    await feed_of(http)
    before = len(built)
    await asyncio.gather(*(feed_of(http) for _ in range(20)))
    health = len(built) - before
    assert len(asked) == 1
    assert health < 20  # those of the gateway's own health


@asynccontextmanager
async def keyed(settings: GatewaySettings, file: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        make_gateway(settings.model_copy(update={"api_keys": file})) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http,
    ):
        await eventually(lambda: gateway.readiness()[0])
        yield http


async def test_a_key_is_needed_and_shows_its_own_tenant_alone(
    settings: GatewaySettings, peers: Peers, tmp_path: Path
) -> None:
    said = key_ring(tmp_path / "keys.json", "acme", "other", "admin")
    async with keyed(settings, tmp_path / "keys.json") as http:
        assert (await http.get("/console")).status_code == 200  # the page itself tells nothing
        assert (await http.get("/console/feed")).status_code == 401
        for name in ("acme", "other"):
            headers = {**said[name], "x-request-id": f"of-{name}"}
            await http.post("/v1/completions", json=BODY, headers=headers)
        await http.post("/v1/completions", json={**BODY, "n": -1}, headers={**said["other"], "x-request-id": "bad"})
        everything = await feed_of(http, headers=said["admin"])
        assert [one["request_id"] for one in everything["requests"]] == ["bad", "of-other", "of-acme"]
        peers.prefill.seen.clear()
        async with held_back(peers, http, headers=said["other"]):
            own, others = [await feed_of(http, headers=said[name]) for name in ("acme", "other")]
        assert own.keys() == {"now", "id", "all", "tenant", "queue", "running", "requests"}
        assert (own["all"], own["tenant"]) == (False, "acme")
        assert [one["request_id"] for one in own["requests"]] == ["of-acme"]
        assert (own["queue"], own["running"]) == ([], [])
        assert [line["tenant"] for line in (*others["queue"], *others["running"])] == ["other", "other"]


async def test_records_are_bounded() -> None:
    records = RequestRecords(most=10)
    for number in range(25):
        records.add("request", partial(dict, request_id=str(number), tenant=str(number % 2)))
    assert [one["request_id"] for one in records.latest(3, None)] == ["24", "23", "22"]
    assert len(records.latest(100, None)) == 10
    assert [one["request_id"] for one in records.latest(2, "1")] == ["23", "21"]


def test_quantiles_are_prometheus_s() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile([0, 0, 0, 0], bounds, 0.5) is None
    assert quantile([10, 10, 10, 10], bounds, 0.5) == 0.5
    assert quantile([0, 10, 20, 20], bounds, 0.75) == 3.0
    assert quantile([0, 0, 0, 5], bounds, 0.5) == 4.0  # beyond the last bound: at least that
