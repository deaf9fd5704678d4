"""`tandem cache` as people type it, at two live workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem.commands.cache import main
from tandem.engine import Request, SamplingParams
from tandem.local import RedisServer
from tandem.worker.life.build import Worker
from tests.registry.cluster import eventually
from tests.worker.test_build import running

Typed = Callable[..., Awaitable[str]]


@pytest.fixture
async def cluster(demo_model: Path, tmp_path: Path) -> AsyncIterator[tuple[str, list[Worker]]]:
    """The registry's URL, and workers d0, without tiers, and p0, which has cached 6 of ann's blocks."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer.start())
        shared = {"model_path": demo_model, "model_name": "demo", "redis_url": redis.url, "engine": "null"}
        decode = DecodeSettings(worker_id="d0", num_blocks=64, **shared)
        prefill = PrefillSettings(worker_id="p0", num_blocks=64, **shared)
        workers = [
            await stack.enter_async_context(running(decode, DecodeWorker)),
            await stack.enter_async_context(running(prefill, PrefillWorker)),
        ]

        async def are_ready() -> bool:
            return all(worker.ready.is_set() for worker in workers)

        await eventually(are_ready, "both are registered")
        port = workers[1].context.ports.engine
        request = Request("r", list(range(1, 100)), SamplingParams(max_tokens=1), cache_salt="ann\0", tenant="ann")
        await port.prepare(request, 60.0)
        await port.call(lambda engine: engine.add(request))

        async def is_cached() -> bool:
            return (await port.call(lambda engine: engine.moving.counts())) == {"ann": 6}

        await eventually(is_cached, "ann's prompt is cached")
        yield redis.url, workers


@pytest.fixture
def run(cluster: tuple[str, list[Worker]], capsys: pytest.CaptureFixture[str]) -> Typed:
    async def typed(*words: str) -> str:
        await asyncio.to_thread(main, [*words, "--redis-url", cluster[0]])
        return capsys.readouterr().out

    return typed


async def test_what_workers_keep_is_listed_pinned_and_dropped(run: Typed) -> None:
    head, decode, prefill = (await run("ls")).splitlines()
    assert head.split() == ["worker", "tier", "blocks", "memory", "used"]
    assert decode.split()[:3] == ["d0", "device", "0"]
    assert prefill.split()[:3] + prefill.split()[-1:] == ["p0", "device", "6", "9.4%"]
    assert (await run("ls", "--tenants")).splitlines()[2].split()[-1] == "ann"
    lines = (await run("pin", "--tenant", "ann", "--for", "60")).splitlines()
    assert lines == [f"{worker}: it has neither --kv-host nor --kv-disk" for worker in ("d0", "p0")]
    assert "p0: blocks dropped: 0 of device" in await run("drop", "--tenant", "bob")
    assert "p0: blocks dropped: 6 of device" in await run("drop", "--tenant", "ann", "--model", "demo")
    assert (await run("ls")).splitlines()[2].split()[2] == "0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ls", "--model", "other"), "tandem cache ls: no worker serves 'other'; they serve: demo"),
        (("drop", "--namespace", "empty"), "tandem cache drop: no worker is registered"),
        (("eat",), 2),
        (("pin",), 2),
        (("pin", "--tenant", "ann", "--for", "-1"), 2),
    ],
)
async def test_what_is_wrong_is_said(run: Typed, words: tuple[str, ...], said: object) -> None:
    with pytest.raises(SystemExit) as ended:
        await run(*words)
    assert ended.value.code == said
