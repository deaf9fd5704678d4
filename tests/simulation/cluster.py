"""A whole cluster in one world: the real gateways, workers and registry, each a process of its own.

    client ── gRPC ──> g0 ── gRPC ──> p0, p1 … ── KV ──> d0, d1 …
                        └── redis ───────┴───────────────┘

Every name keeps its addresses, so a worker that is started again is found where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import grpc
from grpc import aio

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from services.gateway.__main__ import REGISTRY_WAIT_S, RESERVATIONS_LEASE_S
from services.gateway.model.served import ServedModel
from services.gateway.routing import Router
from services.gateway.server import Gateway, GatewayPorts
from services.gateway.settings import Disaggregation, GatewaySettings
from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem import rpc
from tandem.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams, StepTime
from tandem.registry import ModelKey, Registry
from tandem.tiers import KVTier
from tandem.transfer import LinkRuntime
from tandem.transfer.runtime.loop import LoopDriver
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tandem.worker import InlineEngine, Worker, WorkerPorts
from tandem.worker.kv.tiers import KVTiers
from tests.simulation.crashes import Crashes
from tests.simulation.disk import SimulatedDisk, Strike
from tests.simulation.grpc_client import PATIENT, Channel
from tests.simulation.grpc_server import SimulatedServer
from tests.simulation.kv import KVNetwork, Spoil
from tests.simulation.network import SimulatedNetwork
from tests.simulation.redis import EPOCH_S, RedisClient, RedisStore, SimulatedRedis
from tests.simulation.world import Process, World

GRPC_PORT, TRANSFER_PORT = 9000, 9100
LOOKING_TIMEOUT_S = 2.0
READY_S = 30.0
DRAIN_S = 5.0
SWAP_BYTES = 6 * 4 * 32  # a few blocks of the null engine
MODEL = "demo"
# Prompts whose tokens a reference remembers.
MAX_KNOWN = 256


@dataclass(frozen=True)
class ClusterShape:
    """How large a cluster is."""

    gateways: int = 1
    prefills: int = 1
    decodes: int = 1
    num_blocks: int = 64
    block_size: int = 4
    max_num_batched_tokens: int = 32
    prefill_tokens_per_s: float = 8192.0
    decode_step_s: float = 0.010
    max_num_seqs: int = 16
    disaggregation: Disaggregation = Disaggregation.PREFER
    timeout_s: float = 20.0
    disk_blocks: int = 0  # that each worker's disk keeps
    launched: bool = True  # by a launcher, which tells at once how a process died; else its next start does


@dataclass(frozen=True)
class Prompt:
    """A client's request."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float | None = 10.0  # None: the gateway's own
    cache_salt: str = ""
    priority: llm_pb2.Priority = llm_pb2.PRIORITY_INTERACTIVE
    patient: bool = False  # the client says its deadline, and waits for ever
    model: str = MODEL

    def to_proto(self) -> llm_pb2.GenerateRequest:
        return llm_pb2.GenerateRequest(
            model=self.model,
            token_ids=llm_pb2.TokenIds(ids=self.token_ids),
            sampling=llm_pb2.SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, ignore_eos=True
            ),
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


@dataclass
class Reply:
    """The outcome of a request."""

    token_ids: list[int] = field(default_factory=list)
    code: grpc.StatusCode | None = None  # None: it has not ended
    details: str = ""
    finish_reason: int = 0
    path: llm_pb2.Path | None = None
    cached_tokens: int = 0
    began_at: float = 0.0
    first_at: float = 0.0  # when tokens first came
    ended_at: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.began_at


@dataclass
class Guest:
    """A worker of another model: from when it has to be served, and when it went."""

    model: str
    served_at: float
    left_at: float = inf


class SimulatedCluster:
    def __init__(
        self, world: World, store: RedisStore, model: ServedModel, settings: SimulationSettings, *,
        started: bool = True, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """`started`: or else Redis alone runs, and who needs the others starts them. `folder`: for workers' disks."""
        self.world = world
        self.shape = settings.shape
        self.network = SimulatedNetwork(world)
        self.client = world.process("client")
        self.redis = SimulatedRedis(self.network, store)
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, Worker] = {}
        self.gateways: dict[str, Gateway] = {}
        # Of all starts of all workers.
        self.incarnations: list[str] = []
        self.servers: dict[Process, list[SimulatedServer]] = {}
        # Processes that ended by themselves, and the exception they ended with.
        self.exits: list[tuple[str, BaseException | None]] = []
        # Workers of other models, by name, from when they join until they have left, or are told to.
        self.guests: dict[str, Guest] = {}
        # What becomes of each KV message that a worker sends.
        self.spoil: Spoil | None = None
        # And of each block that a disk reads or writes.
        self.strike: Strike = str
        self._folder = folder
        self._disks: dict[str, SimulatedDisk] = {}
        self.tiers: list[KVTier] = []  # of all starts of all workers
        self.crashes = Crashes(world, self.registry_of, self.shape.launched)
        self._settings = settings
        self._model = model
        self._ids = Random(world.random.getrandbits(64))
        if started:
            for role, count in (("g", self.shape.gateways), ("p", self.shape.prefills), ("d", self.shape.decodes)):
                for i in range(count):
                    self.start(f"{role}{i}")

    def start(self, name: str) -> Process:
        """A new process of this name, where no other of it lives."""
        process = self.processes[name] = self.world.process(name)
        self.workers.pop(name, None)
        self.gateways.pop(name, None)
        self.crashes.started(name)
        if disk := self._disks.pop(name, None):
            disk.close()  # as the kernel does when a process ends
        main = process.spawn(self._gateway(name, process) if name[0] == "g" else self._worker(name, process))
        main.add_done_callback(partial(self._ended, name, process))
        return process

    def join(self, name: str, model: str, within_s: float) -> None:
        """A decode worker of another model comes."""
        self.guests[name] = Guest(model, self.world.now + within_s)
        self.start(name)

    def leave(self, name: str, killed: bool) -> None:
        """It goes, in order or by SIGKILL, and is not started again."""
        process, worker = self.processes[name], self.workers.get(name)
        self.guests[name].left_at = min(self.guests[name].left_at, self.world.now)
        if killed or worker is None:
            process.kill()
        else:
            process.deliver(worker.stop)

    def close(self) -> None:
        for disk in self._disks.values():
            disk.close()

    async def ready(self) -> None:
        """Until a request would be served by every worker. Run it in the client."""
        async with asyncio.timeout(READY_S):
            while not self.is_ready():
                assert not self.exits, self.exits
                await asyncio.sleep(0.05)

    def is_ready(self) -> bool:
        """True if every gateway sees every pair of workers linked."""
        num_pairs = self.shape.prefills * self.shape.decodes
        served = [gateway for gateway in self.gateways.values() if hasattr(gateway, "directory")]
        return len(served) == self.shape.gateways and all(
            gateway.readiness()[1]["linked_pairs"] == num_pairs for gateway in served
        )

    async def ask(self, gateway: str, prompt: Prompt, read_pause_s: float = 0.0, reply: Reply | None = None) -> Reply:
        """Run it in the client. Returns however the request ends; `reply` grows as it goes."""
        reply = reply or Reply()
        reply.began_at = self.world.now
        channel: Any = Channel(self.network, self.client, f"{gateway}:{GRPC_PORT}")
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        metadata = [PATIENT] if prompt.patient else []
        try:
            async for message in stub.Generate(prompt.to_proto(), timeout=prompt.timeout_s, metadata=metadata):
                if message.token_ids and not reply.token_ids:
                    reply.first_at = self.world.now
                reply.token_ids += message.token_ids
                reply.finish_reason = message.finish_reason
                if message.HasField("path"):
                    reply.path, reply.cached_tokens = message.path, message.usage.cached_tokens
                if read_pause_s:
                    await asyncio.sleep(read_pause_s)
            reply.code = grpc.StatusCode.OK
        except aio.AioRpcError as error:
            reply.code, reply.details = error.code(), error.details() or ""
        finally:
            reply.ended_at = self.world.now
            await channel.close()
        return reply

    def registry_of(self, process: Process) -> Registry:
        """For a test to look at."""
        return self._registry(process, LOOKING_TIMEOUT_S)

    # --- its processes ---

    def _new_id(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"

    def _registry(self, process: Process, timeout: float, client_lease_s: float | None = None) -> Registry:
        client = RedisClient(self.network, process, "tandem", timeout, self._new_id()[:12])
        return Registry(client, client_lease_s)

    def _serve(self, process: Process) -> Callable[..., Any]:
        def make_server(options: object, interceptors: Sequence[Any]) -> Any:
            server = SimulatedServer(self.network, process, interceptors)
            self.servers.setdefault(process, []).append(server)
            return server

        async def serve(*arguments: Any, **options: Any) -> rpc.Server:
            server = await rpc.serve(*arguments, **options, make_server=make_server)
            set_serving = server.set_serving

            async def noted(serving: bool) -> None:
                self.world.log("readiness", process.name, serving)
                await set_serving(serving)

            server.set_serving = noted  # type: ignore[method-assign]
            return server

        return serve

    async def _worker(self, name: str, process: Process) -> None:
        guest = self.guests.get(name)
        settings = self._settings.worker(name, guest.model if guest else MODEL)
        service = PrefillWorker if name[0] == "p" else DecodeWorker
        config = replace(settings.engine_config(), swap_memory=SWAP_BYTES)
        engine = InlineEngine(config, self.crashes.page_of(process))
        self.crashes.plant(engine.engine, process)
        ports = WorkerPorts(
            engine=engine,
            registry=self._registry(process, settings.registry_wait_s),
            tiers=self._tiers(name, engine),
            serve=self._serve(process),
            links=LinkRuntime(
                KVNetwork(self.network, process, self._spoiled),
                LoopDriver(process),
                lambda: self._ids.getrandbits(63),
            ),
            new_id=self._new_id,
            hostname=name,
            pressure=process.pressure,
        )
        worker = self.workers[name] = Worker(settings, name, service, ports)
        self.incarnations.append(worker.context.incarnation)
        await worker.run()

    def _tiers(self, name: str, engine: InlineEngine) -> KVTiers | None:
        if self._folder is None or not self.shape.disk_blocks:
            return None
        disk = self._disks[name] = SimulatedDisk(
            self._folder / name, engine.engine.layout, self.shape.disk_blocks, lambda: self.strike()
        )
        self.tiers.append(KVTier("disk", disk))
        return KVTiers(engine, self.tiers[-1:], self._new_id)

    async def _gateway(self, name: str, process: Process) -> None:
        ports = GatewayPorts(
            registry=self._registry(process, REGISTRY_WAIT_S, RESERVATIONS_LEASE_S),
            connect=partial(Channel, self.network, process),  # type: ignore[arg-type]
            serve=self._serve(process),
            serve_http=None,
            read_model=self._read_model,
            new_id=self._new_id,
            seeds=Random(self._ids.getrandbits(64)),
            wall=lambda: EPOCH_S + self.world.now,
            pressure=process.pressure,
        )
        gateway = Gateway(self._settings.gateway(name), ports, self._settings.make_router)
        async with gateway:
            self.gateways[name] = gateway
            await gateway.failed()

    async def _read_model(self, key: ModelKey, addresses: Sequence[str]) -> ServedModel:
        return replace(self._model, name=key.name)

    def _ended(self, name: str, process: Process, main: asyncio.Task[None]) -> None:
        """As a process whose main function has returned, or raised."""
        if not self.world.closing:
            error = None if main.cancelled() else main.exception()
            self.exits.append((name, error))
            self.world.log("exit", name, repr(error))
            process.kill()

    def _spoiled(self, message: bytes) -> list[tuple[float, bytes]]:
        return self.spoil(message) if self.spoil else [(0.0, message)]


class SimulationSettings:
    """Settings of every process, made once for many worlds."""

    def __init__(self, model_path: Any, shape: ClusterShape) -> None:
        self.shape = shape
        self.make_router: type[Router] = Router
        self._model_path = model_path
        self._made: dict[str, Any] = {}

    def worker(self, name: str, model: str = MODEL) -> Any:
        return self._of(name, PrefillSettings if name[0] == "p" else DecodeSettings, model)

    def gateway(self, name: str) -> GatewaySettings:
        settings: GatewaySettings = self._of(name, GatewaySettings)
        return settings

    def _of(self, name: str, kind: Any, model: str = MODEL) -> Any:
        if name not in self._made:
            served = {"model_path": self._model_path, "model_name": model}
            own = self._gateway(name) if kind is GatewaySettings else self._worker(name) | served
            self._made[name] = kind(host=name, grpc_port=GRPC_PORT, drain_s=DRAIN_S, **own)
        return self._made[name]

    def _gateway(self, name: str) -> dict[str, Any]:
        return {"disaggregation": self.shape.disaggregation, "timeout_s": self.shape.timeout_s, "insecure": True}

    def _worker(self, name: str) -> dict[str, Any]:
        shape = self.shape
        return {
            "worker_id": name, "transfer_port": TRANSFER_PORT, "transports": ("memory",), "engine": "null",
            "num_blocks": shape.num_blocks, "block_size": shape.block_size, "max_num_seqs": shape.max_num_seqs,
            "max_num_batched_tokens": shape.max_num_batched_tokens,
            "null_step": StepTime(shape.prefill_tokens_per_s, shape.decode_step_s),
        }  # fmt: skip


class Reference:
    """The tokens that one undisturbed engine writes."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = Engine(replace(config, enable_prefix_caching=False), sleep=lambda _: None)
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def tokens(self, prompt: Prompt) -> list[int]:
        key = prompt.token_ids, prompt.temperature > 0 and prompt.seed
        if len(self._known.get(key, ())) < prompt.max_tokens:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._write(prompt)
        return self._known[key][: prompt.max_tokens]

    def _write(self, prompt: Prompt) -> list[int]:
        engine = self._engine
        sampling = SamplingParams(max_tokens=prompt.max_tokens, temperature=prompt.temperature, seed=prompt.seed)
        engine.add(Request("reference", list(prompt.token_ids), sampling))
        written: list[int] = []
        while engine.has_work():
            for output in engine.step():
                written += [token.token_id for token in output.tokens]
                assert output.finish_reason in (None, FinishReason.LENGTH), output
        return written
