"""A model that has workers only while it is asked for, at a gateway: the test is its launcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from tandem.local import free_ports
from tandem.registry import ModelStatus, ModelUse, Registry, Wakefulness
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import OTHER, eventually, leave, with_settings
from tests.gateway.peers import MODEL, Peers

BODY = {"model": OTHER, "prompt": "once upon", "max_tokens": 3}
ASLEEP = ModelStatus(OTHER, Wakefulness.ASLEEP, left_s=2.0, start_s=2.0)
STARTING = ModelStatus(OTHER, Wakefulness.STARTING, left_s=1.0)
AWAKE = ModelStatus(OTHER, Wakefulness.AWAKE, start_s=1.5)
FAILED = ModelStatus(OTHER, Wakefulness.FAILED, left_s=9.2, reason="no such file")
Wake = Callable[[], Coroutine[Any, Any, None]]
MEASURED = {"awake": 1.0, "start_seconds": 1.5, "wait_seconds_count": 5.0}


class FakeLauncher:
    """Says what it is told to, as a launcher does, and hears who is wanted."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.says = [ASLEEP]
        self.used = ModelUse()
        self.wakes: Wake | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            await self._tell(tasks)

    async def _tell(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self.used = (await self._registry.on_demand.tell(self.says, 1.0)).get(OTHER, ModelUse())
            if self.wakes and self.used.wanted_s < 1.0:
                wake, self.wakes = self.wakes, None
                tasks.create_task(wake())
            await asyncio.sleep(0.05)


@asynccontextmanager
async def launching(settings: GatewaySettings) -> AsyncIterator[FakeLauncher]:
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    launcher = FakeLauncher(registry)
    running = asyncio.create_task(launcher.run())
    try:
        yield launcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await registry.close()


@pytest.fixture
async def launcher(settings: GatewaySettings, gateway: Gateway, others: Peers) -> AsyncIterator[FakeLauncher]:
    """Its model is asleep; `wakes` gives it its workers."""
    await leave(others, "other-d", "other-p")
    async with launching(settings) as launcher:

        async def wake() -> None:
            launcher.says = [STARTING]
            await asyncio.sleep(1.2)
            await others.add_decode("other-d")
            await others.add_prefill("other-p")
            launcher.says = [AWAKE]

        launcher.wakes = wake
        await eventually(lambda: gateway.directory.sleepers.is_asleep(OTHER))
        yield launcher


async def test_a_request_waits_until_its_model_is_awake(http: httpx.AsyncClient, launcher: FakeLauncher) -> None:
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert (cards[OTHER]["state"], cards[OTHER]["starts_in_s"], cards[MODEL]["state"]) == ("asleep", 2.0, "ready")
    assert (await http.get(f"/v1/models/{OTHER}")).json() == cards[OTHER]
    models = (await http.get("/health/ready")).json()["models"]
    assert (models[OTHER]["ready"], models[OTHER]["state"]) == (False, "asleep")
    answers = await asyncio.gather(*(http.post("/v1/completions", json=BODY) for _ in range(5)))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert float(answer.headers["x-tandem-woken-after-s"]) > 0.5
    assert (await http.get(f"/v1/models/{OTHER}")).json()["state"] == "ready"
    again = await http.post("/v1/completions", json=BODY)
    assert (again.status_code, "x-tandem-woken-after-s" in again.headers) == (200, False)
    assert (await http.post("/tokenize", json={"model": OTHER, "prompt": "x"})).status_code == 200

    async def measured() -> bool:
        lines = {f'tandem_on_demand_{what}{{model_name="{OTHER}"}} {number}' for what, number in MEASURED.items()}
        return lines <= set((await http.get("/metrics")).text.splitlines())

    await eventually(measured)  # the launcher's word comes behind its workers


async def test_other_models_and_their_texts_wait_for_none_that_starts(
    http: httpx.AsyncClient, launcher: FakeLauncher
) -> None:
    launcher.wakes = None
    launcher.says = [ModelStatus(OTHER, Wakefulness.STARTING, left_s=5.0)]
    waiting = [asyncio.create_task(http.post("/tokenize", json={"model": OTHER, "prompt": "x"})) for _ in range(20)]
    await eventually(lambda: launcher.used.wanted_s < 1.0)
    async with asyncio.timeout(10.0):
        assert (await http.post("/tokenize", json={"model": MODEL, "prompt": "x"})).status_code == 200
        assert (await http.post("/v1/completions", json=BODY | {"model": MODEL})).status_code == 200
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "once upon"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "once"}]}),
        ("messages", {"messages": [{"role": "user", "content": "once"}]}),
        ("responses", {"input": "once"}),
    ],
)
async def test_a_stream_says_in_comments_that_its_model_starts(
    http: httpx.AsyncClient, launcher: FakeLauncher, path: str, body: dict[str, Any]
) -> None:
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = await http.post(f"/v1/{path}", json={"model": OTHER, "stream": True, limit: 3, **body})
    first, *rest = answer.text.split("\n\n")
    assert first.startswith(f": {OTHER} is starting, about 1 s more")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert sum(not event.startswith(":") for event in rest) > 2
    assert "error" not in answer.text.replace('"error":null', "")


@pytest.mark.parametrize(("path", "begins"), [
    ("completions", "data: {"), ("messages", "event: error\ndata: {"), ("responses", "event: error\ndata: {"),
])  # fmt: skip
async def test_a_failed_start_ends_a_stream_with_an_error_in_its_protocols_words(
    http: httpx.AsyncClient, launcher: FakeLauncher, path: str, begins: str
) -> None:
    async def fail() -> None:
        launcher.says = [STARTING]
        await asyncio.sleep(1.5)
        launcher.says = [FAILED]

    launcher.wakes = fail
    said = {"prompt": "x", "messages": [{"role": "user", "content": "once"}], "input": "x", "max_tokens": 3}
    answer = await http.post(f"/v1/{path}", json={"model": OTHER, "stream": True, **said})
    last = answer.text.rstrip().split("\n\n")[-1]
    assert last.startswith(begins)
    assert "could not be started: no such file" in last
    whole = await http.post("/v1/completions", json=BODY)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "start_failed")
    assert whole.headers["retry-after"] == "10"


async def test_too_short_a_deadline_is_told_the_seconds_and_is_heard_all_the_same(
    http: httpx.AsyncClient, launcher: FakeLauncher
) -> None:
    refused = await http.post("/v1/completions", json=BODY, headers={"x-request-timeout-ms": "700"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert refused.headers["retry-after"] == "2"
    assert "takes about 2 s more" in refused.json()["error"]["message"]
    await eventually(lambda: launcher.says == [AWAKE])
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_launcher_that_dies_leaves_nobody_waiting(
    http: httpx.AsyncClient, settings: GatewaySettings, gateway: Gateway
) -> None:
    async with launching(settings):
        await eventually(lambda: gateway.directory.sleepers.is_asleep(OTHER))
        asking = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in asking)
    async with asyncio.timeout(10.0):
        answers = await asyncio.gather(*asking)
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_launcher")
    assert (await http.post("/v1/completions", json=BODY)).status_code == 404


async def test_a_client_that_leaves_wants_nothing_any_more(http: httpx.AsyncClient, launcher: FakeLauncher) -> None:
    launcher.wakes = None
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=BODY, timeout=0.5)
    await eventually(lambda: launcher.used.wanted_s > 1.5, within_s=10.0)


async def test_one_that_is_about_to_stop_takes_nothing_new(
    http: httpx.AsyncClient, launcher: FakeLauncher, gateway: Gateway
) -> None:
    """Its workers are still there."""
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    launcher.says = [ModelStatus(OTHER, Wakefulness.STOPPING, left_s=0.5)]
    await eventually(lambda: gateway.directory.sleepers.is_asleep(OTHER))
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await asyncio.sleep(1.0)
    assert not asking.done()
    launcher.says = [AWAKE]
    assert (await asking).status_code == 200


async def test_answers_that_run_keep_their_model_in_use(
    http: httpx.AsyncClient, launcher: FakeLauncher, others: Peers
) -> None:
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    await eventually(lambda: launcher.used.ran_s > 1.5)
    others.workers["other-d"].servicer.step_s = 1.0
    long = asyncio.create_task(http.post("/v1/completions", json=BODY | {"max_tokens": 4}))
    for _ in range(8):
        await asyncio.sleep(0.25)
    assert not long.done()
    assert launcher.used.ran_s < 1.5
    assert (await long).status_code == 200
    await eventually(lambda: launcher.used.ran_s > 1.5)


async def test_nothing_that_is_malformed_or_unknown_wakes_anything(
    http: httpx.AsyncClient, launcher: FakeLauncher, gateway: Gateway
) -> None:
    for content, status in ((b"{", 400), (b'{"model": 3}', 404), (b'{"model": "x", "prompt": "x"}', 404), (b"[]", 400)):
        assert (await http.post("/v1/completions", content=content)).status_code in (400, status)
    assert launcher.used.wanted_s == float("inf")


async def test_a_gateway_whose_only_model_sleeps_is_ready_and_tells_names_from_it(
    settings: GatewaySettings, others: Peers, gateway: Gateway, peers: Peers
) -> None:
    await leave(others, "other-d", "other-p")
    alone = settings.model_copy(update={"http_port": free_ports(1)[0], "models": (OTHER,)})
    async with launching(settings), make_gateway(alone) as second:
        await eventually(lambda: second.readiness()[0])
        assert second.directory.names == [OTHER]
        with pytest.raises(Exception, match="model is required: one of other"):
            second.directory.llm_of(None)
        with pytest.raises(Exception, match="'x' is not served here"):
            second.directory.llm_of("x")


@with_settings(aliases={"fast": {OTHER: 1, MODEL: "fallback"}, "slow": {MODEL: 1, OTHER: "fallback"}})
async def test_behind_an_alias_one_that_sleeps_is_woken_unless_it_is_a_fallback_of_what_is_there(
    http: httpx.AsyncClient, launcher: FakeLauncher
) -> None:
    answer = await http.post("/v1/completions", json=BODY | {"model": "slow"})
    assert answer.headers["x-tandem-model"] == MODEL
    assert launcher.used.wanted_s == float("inf")
    listed = {card["id"]: card["state"] for card in (await http.get("/v1/models")).json()["data"]}
    assert listed["fast"] == listed["slow"] == "ready"
    answer = await http.post("/v1/completions", json=BODY | {"model": "fast"})
    assert (answer.headers["x-tandem-model"], answer.json()["model"]) == (OTHER, "fast")
    launcher.says = [FAILED]
    await asyncio.sleep(1.2)
    answer = await http.post("/v1/completions", json=BODY | {"model": "fast"})
    assert (answer.status_code, answer.headers["x-tandem-model"]) == (200, MODEL)
    assert answer.headers["x-tandem-model-reason"] == f"fallback of fast: no workers of {OTHER}"


async def test_grpc_waits_too_says_so_at_once_and_lists_it(gateway: Gateway, launcher: FakeLauncher) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        listed = {model.id: model.state for model in (await stub.ListModels(llm_pb2.ListModelsRequest())).models}
        assert listed == {MODEL: "", OTHER: "asleep"}
        sampling = llm_pb2.SamplingParams(max_tokens=5)
        request = llm_pb2.GenerateRequest(model=OTHER, prompt="once", sampling=sampling)
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request), timeout=0.5)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        call = stub.Generate(request, timeout=60)
        said = dict(await call.initial_metadata())
        assert said["x-tandem-model-state"] in ("asleep", "starting", "awake")
        assert [message async for message in call][-1].usage.completion_tokens == 5
