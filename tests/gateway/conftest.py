from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import pytest

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.settings import Disaggregation
from services.gateway.text import Tokenizer
from tandem.local import RedisServer, free_ports
from tandem.registry import Registry, WorkerInfo
from tandem.v1 import worker_pb2
from tests.gateway.peers import CONTEXT, Peers, folder_of, peers_on
from tests.gateway.tiny_model import byte_level_tokenizer

T = TypeVar("T")
OTHER = "other"
TEXT = "the quick brown fox 狐狸 jumps over 🦊 the lazy dog"


async def eventually(check: Callable[[], bool | Awaitable[bool]], within_s: float = 30.0) -> None:
    """Waits until `check()` holds: by far longer than that takes on any machine."""
    async with asyncio.timeout(within_s):
        while True:
            found = check()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


def connected(gateway: Gateway, info: WorkerInfo) -> bool:
    """False, too, where the gateway has loaded no model yet."""
    return any(llm.pool.connected(info) for llm in gateway.directory.llms.values())


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return folder_of(CONTEXT)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(autouse=True)
def registry_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How long gateways wait for Redis: by far longer than it takes, unless a test says otherwise."""

    def change(seconds: float) -> None:
        monkeypatch.setattr("services.gateway.__main__.REGISTRY_WAIT_S", seconds)

    change(30.0)
    return change


@pytest.fixture(autouse=True)
def heads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's head waits for its first token, slow as it may be, unless a test says otherwise."""
    monkeypatch.setattr("services.gateway.door.pings.HEAD_S", 60.0)


@pytest.fixture(autouse=True)
def helper_starts_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway's helper process costs a second of CPU, which a test on a busy machine is not to pay by taking long."""
    monkeypatch.setattr("tandem.containment.sandbox.START_S", 3600.0)


@pytest.fixture(autouse=True)
def migrations_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer whose worker is lost waits for another one for no longer than a test likes to."""
    monkeypatch.setattr("services.gateway.server.MIGRATION_WAIT_S", 0.5)


@pytest.fixture
def patient(migrations_wait: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits by far longer than a worker takes to come."""
    monkeypatch.setattr("services.gateway.server.MIGRATION_WAIT_S", 60.0)


@pytest.fixture
def settings(request: pytest.FixtureRequest, redis: RedisServer) -> GatewaySettings:
    """A test may ask for others, by `with_settings`."""
    return make_settings(redis, **getattr(request, "param", {}))


def with_settings(**others: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("settings", [others], indirect=True, ids=[""])


def make_settings(redis: RedisServer, **other: Any) -> GatewaySettings:
    said = {"disaggregation": Disaggregation.PREFER}  # short prompts use both workers
    no_target = {"ttft_s": None}  # a busy machine is slow to its first token
    said |= {"classes": {"realtime": no_target, "interactive": no_target}} | other
    return GatewaySettings(
        redis_url=redis.url, namespace=f"t{uuid4().hex[:8]}",
        host="127.0.0.1", http_port=free_ports(1)[0], grpc_port=0, drain_s=0.2, **said,
    )  # fmt: skip


@asynccontextmanager
async def linked_pair(settings: GatewaySettings, tokenizer: Tokenizer) -> AsyncIterator[Peers]:
    """One prefill and one decode worker, linked."""
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    words = list(await tokenizer.encode(TEXT, add_special_tokens=False))

    def reply(spec: worker_pb2.SequenceSpec) -> list[int]:
        return (words * 20)[spec.sampling.seed % 7 :] if spec.sampling.ignore_eos else words[spec.sampling.seed % 7 :]

    async with peers_on(registry, reply) as peers:
        await peers.add_decode()
        await peers.add_prefill()
        yield peers


@asynccontextmanager
async def lonely_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """It knows the model of a worker that has left, for as long as a module's tests take."""
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.gateway.directory.roster.GONE_S", 1e9)
        async with make_gateway(settings) as gateway:
            async with peers_on(registry, lambda spec: []) as peers:
                peer = await peers.add_decode()
                await eventually(lambda: bool(gateway.directory.llms))
                peer.heartbeat.cancel()
                await registry.leases.deregister("d", peer.info.incarnation)
                await eventually(lambda: not gateway.shared.view.workers)
            await eventually(lambda: not gateway.directory.connections)
            yield gateway


@pytest.fixture
async def peers(settings: GatewaySettings, tokenizer: Tokenizer) -> AsyncIterator[Peers]:
    async with linked_pair(settings, tokenizer) as peers:
        yield peers


@pytest.fixture
async def gateway(settings: GatewaySettings, peers: Peers) -> AsyncIterator[Gateway]:
    """Started and ready."""
    async with make_gateway(settings) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        yield gateway


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{gateway.settings.http_port}"
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        yield client


def with_permuted_vocabulary(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    said = json.loads((to / "tokenizer.json").read_text(encoding="utf-8"))
    words = said["model"]["vocab"]
    first, second = list(words)[40:42]
    words[first], words[second] = words[second], words[first]
    (to / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    return to


@pytest.fixture
async def others(settings: GatewaySettings, gateway: Gateway, tmp_path: Path) -> AsyncIterator[Peers]:
    """Workers of another model in the same namespace: other tokens, another template, a shorter context."""
    folder = with_permuted_vocabulary(folder_of(CONTEXT), tmp_path / "other")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}other:{{ m['content'] }}{% endfor %}", encoding="utf-8"
    )
    tokenizer = Tokenizer.load(folder)
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    words = list(await tokenizer.encode(TEXT, add_special_tokens=False))
    async with peers_on(registry, lambda spec: words) as peers:
        peers.model, peers.folder, peers.max_model_len = OTHER, folder, 128
        await peers.add_decode("other-d")
        await peers.add_prefill("other-p")
        yield peers


async def joined(gateway: Gateway, name: str = OTHER) -> None:
    def ready() -> bool:
        return bool(gateway.readiness()[1]["models"].get(name, {}).get("ready"))

    await eventually(ready)


async def leave(peers: Peers, *names: str) -> None:
    for name in names:
        await peers.workers[name].die()
        await peers.registry.leases.deregister(name, peers.workers.pop(name).info.incarnation)
