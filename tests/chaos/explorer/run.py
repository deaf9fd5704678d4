"""One schedule, run and judged.

1 begin    every worker linked; what tasks and connections there are is noted
2 busy     requests and faults at their moments, until every request has ended
3 heal     what was broken is mended, what was killed is started again
4 probe    a request to each gateway, which has to succeed
5 check    within SETTLE_S nothing is held any more
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from grpc import StatusCode

from services.gateway.directory.roster import GONE_S
from services.gateway.model.served import ServedModel
from services.gateway.workers.stream import SUSPECT_S
from tandem.registry import Registry
from tandem.v1 import llm_pb2
from tests.chaos.explorer.faults import SLOWEST_S, Faults
from tests.chaos.explorer.schedule import AMPLE_BLOCKS, Schedule, ScheduledRequest, names
from tests.chaos.explorer.visits import GONE, Visits
from tests.chaos.explorer.waits import counted
from tests.simulation.baseline import leftovers, orphans, registry_leftovers, sizes
from tests.simulation.cluster import (
    MODEL,
    ClusterShape,
    Prompt,
    Reference,
    Reply,
    SimulatedCluster,
    SimulationSettings,
)
from tests.simulation.network import NOTICE_S
from tests.simulation.redis import RedisStore
from tests.simulation.world import Stuck, World

SETTLE_S = 2.0
RECOVER_S = 10.0
LOOK_S = 0.005
LIMIT_S = 150.0
# Deadlines this far away are met by a cluster that nothing happens to.
AMPLE_S = 4.0
# So late at most a request ends that its client does not end itself, before other guards of the gateway would end it.
PROMPT_S = 0.25
# A silent peer is noticed in this time.
NOTICED_S = 2.0
# So often a request goes on elsewhere.
MIGRATIONS = 8
MOST_CRASHES = 2
# Where workers' disks lie, so that they are quick.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Result:
    schedule: Schedule
    violations: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    simulated_s: float = 0.0


class Explorer:
    """Runs schedules, one after another, over one store."""

    def __init__(self, store: RedisStore, model_path: Path) -> None:
        self._store = store
        self._model_path = model_path
        self._model = ServedModel.load(model_path, MODEL, 0)
        self._settings: dict[ClusterShape, SimulationSettings] = {}
        self._references: dict[int, Reference] = {}

    def run(self, schedule: Schedule) -> Result:
        result = Result(schedule)
        if schedule.shape not in self._settings:
            self._settings[schedule.shape] = SimulationSettings(self._model_path, schedule.shape)
        settings = self._settings[schedule.shape]
        with World(schedule.seed) as world, counted(result.waits), TemporaryDirectory(dir=MEMORY) as folder:
            cluster = SimulatedCluster(world, self._store, self._model, settings, folder=Path(folder))
            run = Run(cluster, schedule, self.tokens, result)
            try:
                world.run(run.cluster.client, run.play(), limit_s=LIMIT_S)
            except Stuck as error:
                result.violations.append(f"I1: {error}; {run.waiting()}")
            finally:
                cluster.close()
            result.violations += [f"unhandled: {error}" for error in world.errors]
            result.events, result.simulated_s = world.events, world.now
            result.fired += run.faults.fired + run.visits.fired
            result.fired["restored block"] += sum(tier.num_restored for tier in cluster.tiers)
        return result

    def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens that an undisturbed engine writes."""
        if not self._references:
            shape = ClusterShape(num_blocks=256)
            config = SimulationSettings(self._model_path, shape).worker("d0").engine_config()
            self._references[0] = Reference(config)
        return self._references[0].tokens(prompt)


class Run:
    def __init__(
        self, cluster: SimulatedCluster, schedule: Schedule, tokens: Callable[[Prompt], list[int]], result: Result
    ) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.schedule = schedule
        self.result = result
        self.faults = Faults(cluster, Random(schedule.seed + 1))
        self.visits = Visits(cluster, lambda: bool(self.faults.starved) or sum(self.faults.touched.values()) > 0)
        # All that was asked, the later turns of conversations behind the first ones.
        self.asked = [(request, Reply()) for request in schedule.requests]
        self._tokens = tokens

    async def play(self) -> None:
        await self.cluster.ready()
        await asyncio.sleep(0.3)  # streams, links and loads settle
        before = sizes(self.cluster)
        await self.visits.begin(self.schedule.visits)
        self._look()
        for fault in self.schedule.faults:
            self.faults.plan(fault)
        tasks = [asyncio.create_task(self._converse(*asked)) for asked in self.asked]
        await asyncio.gather(*tasks)
        while waiting := [poison.task for poison in self.faults.poisons.values() if not poison.task.done()]:
            await asyncio.wait(waiting)
        self._judge_poisons()
        self._judge()
        self._judge_readiness()
        self._judge_patience()
        await self.visits.end()
        self.faults.heal()
        await self._recover()
        await asyncio.sleep(max(0.0, self.faults.noticed_at - self.world.now))
        await self._recover()  # also what stood still when it was told to end
        await self._probe()
        await self._settle(before)
        self.result.violations += self.visits.violations

    def _look(self) -> None:
        """So often, at moments of no process: that no KV may land where it is expected no more."""
        self.result.violations += [f"I4: {text}" for text in orphans(self.cluster)][: not self.result.violations]
        self.world.after(LOOK_S, self._look)

    def waiting(self) -> str:
        late = [str(i) for i, (_, reply) in enumerate(self.asked) if reply.code is None]
        return f"requests without an end: {', '.join(late) or 'none'}"

    def _violation(self, text: str) -> None:
        self.result.violations.append(text)

    # --- requests ---

    async def _converse(self, request: ScheduledRequest, reply: Reply) -> None:
        await asyncio.sleep(request.at_s)
        await self._ask(request, reply)
        room = self.schedule.shape.num_blocks * self.schedule.shape.block_size
        while reply.code is StatusCode.OK and (later := request.next_turn(reply.token_ids)):
            if len(later.prompt.token_ids) + later.prompt.max_tokens > room:
                return
            request, reply = later, Reply()
            self.asked.append((request, reply))
            self.result.fired["turn"] += 1
            await self._ask(request, reply)

    async def _ask(self, request: ScheduledRequest, reply: Reply) -> None:
        task = asyncio.create_task(self.cluster.ask(request.gateway, request.prompt, request.read_pause_s, reply=reply))
        if request.abort:
            await asyncio.sleep(request.abort.at_s)
            if request.abort.messages:
                reached = asyncio.get_running_loop().create_future()
                self.cluster.network.at_message(request.abort.messages, lambda: reached.set_result(None))
                await asyncio.wait([reached, task], return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
            self.result.fired["abort"] += task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.result.codes[reply.code.name if reply.code else "aborted"] += 1
        self.result.fired["slow reader"] += request.read_pause_s > 0
        self.result.fired["deadline"] += reply.code is StatusCode.DEADLINE_EXCEEDED

    def _judge(self) -> None:
        for request, reply in self.asked:
            for problem in self._problems(request, reply):
                self._violation(f"request at {request.at_s} to {request.gateway}: {problem}")

    def _problems(self, request: ScheduledRequest, reply: Reply) -> list[str]:
        problems = []
        expected = self._tokens(request.prompt)
        if reply.token_ids != expected[: len(reply.token_ids)]:
            problems.append(f"I2: got {reply.token_ids}, where an undisturbed engine writes {expected}")
        if reply.code is StatusCode.OK and len(reply.token_ids) < len(expected):
            problems.append(f"I2: OK after {len(reply.token_ids)} of {len(expected)} tokens")
        if reply.path and reply.cached_tokens and self._is_alone(request, reply) and "after" not in reply.path.reason:
            problems.append(f"I4: {reply.cached_tokens} tokens of a salt that no other request has were cached")
        timeout_s = request.prompt.timeout_s or self.schedule.shape.timeout_s
        took = reply.ended_at - reply.began_at
        reading = request.read_pause_s * (len(expected) + 1)
        end_s = PROMPT_S if request.prompt.patient and not reading else 1.0
        if took > timeout_s + end_s + reading + self._unheard_s(request.gateway):
            problems.append(f"I1: took {took:.3f} s with {timeout_s} s to its deadline")
        problems += [f"I5: {text}" for text in self._unexplained(reply, request.prompt.model)]
        if reply.code not in (None, StatusCode.OK) and not self._is_excused(request, reply, took, timeout_s):
            problems.append(f"{reply.code.name if reply.code else ''}: {reply.details}")
        return problems

    def _is_alone(self, request: ScheduledRequest, reply: Reply) -> bool:
        """True if no other request may have left blocks that this one may use: a later one may overtake the first."""
        salt = request.prompt.cache_salt
        salted = [other for asked, other in self.asked if asked.prompt.cache_salt == salt and other is not reply]
        earlier = [other for other in salted if other.began_at < reply.ended_at]
        return salt.startswith("own-") and not request.is_later and not earlier

    def _unheard_s(self, gateway: str) -> float:
        """How much later a client may hear of its request's end."""
        return (NOTICE_S[1] if self._is_touched(gateway) else 0) + (SLOWEST_S if gateway in self.faults.starved else 0)

    def _unexplained(self, reply: Reply, model: str) -> list[str]:
        """Violations in an answer's end: what it should say and does not, or says and is not so."""
        if reply.code is not StatusCode.OK:
            return [] if reply.code is None or reply.details else [f"{reply.code.name} without a reason"]
        path = reply.path
        if path is None or not path.kind or not path.reason:
            return [f"it does not say which path it took and why: {path}"]
        known = names(self.schedule.shape) if model == MODEL else [*self.visits.of_model(model), "nobody"]
        remote, wrong = path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL, []
        if not {path.decode_worker, path.prefill_worker or known[0]} <= set(known):
            wrong.append(f"it names workers that there are not: {path}")
        if remote != bool(path.prefill_worker) or (remote and not (path.transfer_bytes and path.transport)):
            wrong.append(f"a remote prompt has a prefill worker, and KV that moved: {path}")
        if bool(path.migrated) != ("; after " in path.reason):
            wrong.append(f"an answer that migrated says after which loss: {path}")
        return wrong

    def _judge_poisons(self) -> None:
        """None has ended more than two processes, but for those that stood still and computed it when they went on.
        Where nothing else has happened, it is refused for that.
        """
        late = len((self.faults.paused | self.faults.starved) & self.cluster.workers.keys())
        for number, poison in self.faults.poisons.items():
            reply, crashed = poison.reply, self.cluster.crashes.of_prompt[number]
            self.result.codes[f"poison {reply.code.name}" if reply.code else "poison"] += 1
            if crashed > MOST_CRASHES + late:
                self._violation(f"I7: a request has ended {crashed} workers: {reply}")
            if reply.code is StatusCode.OK or len(reply.token_ids) > poison.place:
                self._violation(f"I7: an answer beyond what crashes: {reply}")
            refused = reply.code is StatusCode.FAILED_PRECONDITION
            if refused != (crashed == MOST_CRASHES) and self._kinds() == {"poison"}:
                self._violation(f"I7: {crashed} workers were ended by a request that got {reply}")

    def _kinds(self) -> set[str]:
        """Kinds of its faults that may excuse anything."""
        return {fault.kind for fault in self.schedule.faults} - {"log-full"}

    def _judge_readiness(self) -> None:
        """No worker's fault changes another's."""
        unready = {str(event[2]) for event in self.world.events if event[1] == "readiness" and not event[3]}
        for name in sorted(unready & self.cluster.workers.keys() - self.cluster.guests.keys()):
            if not self._is_touched(name):
                self._violation(f"R9: {name} is not ready, and nothing has happened to it")

    def _judge_patience(self) -> None:
        """Who was only slow is not taken for dead where nobody else could take its place."""
        if self._kinds() != {"starve"}:
            return
        for at_s, gateway, reason in [(e[0], e[2], e[4]["reason"]) for e in self.world.events if _goes_on(e)]:
            # A worker ends the stream of a gateway that itself stood still.
            if reason.startswith(tuple(self._sole(at_s, gateway))) and "ABORTED" not in reason:
                self._violation(f"I8: only slow, and given up: {reason}")

    def _sole(self, at_s: float, gateway: str) -> list[str]:
        """Those whose place nobody could take then, as logs name them."""
        shape = self.schedule.shape
        sole = ["worker d0:"] * (shape.decodes == 1)
        if shape.prefills == 1 and (shape.disaggregation == "require" or not self._decode_answers(at_s, gateway)):
            sole.append("worker p0:")  # elsewhere a decode worker prefills in its place
        return sole

    def _decode_answers(self, at_s: float, gateway: str) -> bool:
        """True if the gateway had heard of a decode worker a moment before."""
        return any(
            kind == "message" and said[0][0] == "d" and said[1] == gateway and 0 <= at_s - then_s < SUSPECT_S
            for then_s, kind, *said in self.world.events
        )

    def _is_touched(self, name: str) -> bool:
        return self.faults.touched[name] > 0

    def _is_excused(self, request: ScheduledRequest, reply: Reply, took: float, timeout_s: float) -> bool:
        """True if a request may have failed like this, given what has happened."""
        touched, tight = self.faults.touched, self.schedule.shape.num_blocks < AMPLE_BLOCKS
        # Where blocks are few, also for those that somebody holds who reads slowly.
        slow = any(one.read_pause_s > 0 for one in self.schedule.requests) if tight else request.read_pause_s > 0
        held_up = slow or sum(touched.values()) > 0 or bool(self.faults.starved)
        if request.prompt.model != MODEL and self._may_be_gone(request, reply, held_up):
            return reply.code in GONE
        if reply.code is StatusCode.DEADLINE_EXCEEDED:
            ample_s = 2 * AMPLE_S if tight else AMPLE_S
            return took >= timeout_s - 0.01 and (timeout_s < ample_s + self._hindered_s() or slow)
        if reply.code is StatusCode.RESOURCE_EXHAUSTED:  # by a forecast, made from what a fault may have slowed
            return not reply.token_ids and ((timeout_s < AMPLE_S and took < timeout_s) or held_up)
        return reply.code is StatusCode.UNAVAILABLE and self._may_be_unavailable(request, reply)

    def _may_be_gone(self, request: ScheduledRequest, reply: Reply, held_up: bool) -> bool:
        """True if there may have been a time without a worker of its model, none of which has a prefill worker."""
        alone = self.schedule.shape.disaggregation == "require"
        return held_up or alone or not self.visits.had_worker(request.prompt.model, reply)

    def _hindered_s(self) -> float:
        """How much later all may have come for what happened: each fault's own time, and until it was noticed."""
        if self._had_nobody() or any(kind.startswith("kv-") for kind in self.faults.touched):
            return inf  # a lost end of a transfer is noticed at the request's deadline
        untold = any(kind == "vanish" or kind.startswith("redis") for kind in self.faults.fired)
        if untold and len(self.faults.struck.keys() & self.cluster.workers.keys()) > 1:
            return inf  # behind two deaths, of one of which nobody tells or Redis has lost it, it waits for word
        others = [fault for fault in self.schedule.faults if fault.kind not in ("starve", "log-full")]
        late_s = sum(fault.seconds + NOTICED_S for fault in others) if self.faults.touched else 0.0
        return late_s + self.faults.starved_s

    def _may_be_unavailable(self, request: ScheduledRequest, reply: Reply) -> bool:
        """Its gateway died or stood still, it was lost too often, or nobody was there when it came."""
        gateway = self.faults.struck.get(request.gateway, inf) <= reply.ended_at
        often = sum(self.faults.touched.values()) > MIGRATIONS
        return gateway or often or (self._had_nobody() and not reply.token_ids)

    def _had_nobody(self) -> bool:
        """True if there may have been a time without any worker of a role that is needed."""
        touched, shape = self.faults.touched, self.schedule.shape
        decodes = sum(touched[name] > 0 for name in names(shape) if name[0] == "d") == shape.decodes
        prefills = sum(touched[name] > 0 for name in names(shape) if name[0] == "p") == shape.prefills
        # Once Redis' clock has jumped over leases, or one is spoilt, nobody is registered until the next heartbeats.
        unleased = touched["redis-clock"] + touched["redis-garbage"] > 0
        return decodes or unleased or (prefills and shape.disaggregation == "require")

    # --- afterwards ---

    async def _recover(self) -> None:
        """Whatever happened, everything works again."""
        registry = self.cluster.registry_of(self.cluster.client)
        num_workers = self.schedule.shape.prefills + self.schedule.shape.decodes
        try:
            async with asyncio.timeout(RECOVER_S):
                # By the registry's own clock, which may have jumped over every lease.
                while not self._is_whole() or len(await registry.workers()) < num_workers:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            found = {name: gateway.readiness()[1] for name, gateway in self.cluster.gateways.items()}
            self._violation(f"not whole again {RECOVER_S} s after the last fault: {found}")
        await registry.close()

    def _is_whole(self) -> bool:
        for name, process in list(self.cluster.processes.items()):
            if not process.alive and name not in self.cluster.guests:
                self.cluster.start(name)
        stopping = any(one._draining for name, one in self.cluster.workers.items() if name not in self.cluster.guests)
        left = not any(self.cluster.processes[name].alive for name in self.cluster.guests)
        return self.cluster.is_ready() and left and not stopping

    async def _probe(self) -> None:
        for i in range(self.schedule.shape.gateways):
            prompt = Prompt(tuple(range(100, 117)), 6)
            reply = await self.cluster.ask(f"g{i}", prompt)
            if reply.code is not StatusCode.OK or reply.token_ids != self._tokens(prompt):
                self._violation(f"a request to g{i} after all faults: {reply}")

    async def _settle(self, before: dict[str, tuple[int, int]]) -> None:
        registry = self.cluster.registry_of(self.cluster.client)
        others = bool(self.cluster.guests) or self.faults.fired["redis-garbage"] > 0  # whose name may be any model's
        await self._wait_released(registry, {} if others else before)
        if others:
            # Gateways remember a model for so long behind its last worker's lease, and nothing of it after.
            await asyncio.sleep(SETTLE_S + GONE_S)
            await self._wait_released(registry, before)
        await registry.close()
        if len(set(self.cluster.incarnations)) < len(self.cluster.incarnations):
            self._violation(f"I4: an incarnation is used again: {sorted(self.cluster.incarnations)}")
        for name, error in self.cluster.exits:
            if error is not None:
                self._violation(f"{name} ended by itself: {error!r}")

    async def _wait_released(self, registry: Registry, before: dict[str, tuple[int, int]]) -> None:
        end = self.world.now + SETTLE_S + self.faults.slowest_s
        while held := await self._held(registry, before):
            if self.world.now > end and (leftovers(self.cluster) or not await self._outlived(registry)):
                self.result.violations += [f"I3: {text}" for text in held]
                break
            await asyncio.sleep(0.1)

    async def _outlived(self, registry: Registry) -> bool:
        """True while a dead gateway's lease still holds reservations: that of a starved one lasts longer."""
        if self.faults.starved.isdisjoint(self.cluster.gateways):
            return False
        return (await registry.check_integrity()).held["clients"] > self.schedule.shape.gateways

    async def _held(self, registry: Any, before: dict[str, tuple[int, int]]) -> list[str]:
        held = leftovers(self.cluster) or await registry_leftovers(registry)
        if not held:
            for name, (tasks, ends) in sizes(self.cluster).items():
                most_tasks, most_ends = before.get(name, (inf, inf))
                if tasks > most_tasks:
                    held.append(f"{name}: {tasks} tasks where {most_tasks} were")
                most_ends += self._links_of_fetches(name)
                if ends > most_ends:
                    held.append(f"{name}: {ends} connections where {most_ends} were")
        return held

    def _links_of_fetches(self, name: str) -> int:
        """Returns how many links to and from others of its role a worker may keep, once KV was fetched by them."""
        of_role = {"p": self.schedule.shape.prefills, "d": self.schedule.shape.decodes}.get(name[0], 1)
        return 2 * (of_role - 1)


def _goes_on(event: tuple[Any, ...]) -> bool:
    return event[1] == "log" and event[4]["event"] == "going on elsewhere"
