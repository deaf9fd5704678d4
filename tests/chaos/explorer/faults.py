"""Carries out each kind of fault on a cluster, and counts how often each has had an effect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from tests.chaos.explorer.schedule import Fault
from tests.simulation.cluster import Prompt, Reply, SimulatedCluster
from tests.simulation.crashes import POISON
from tests.simulation.network import NOTICE_S, SimulatedConnection
from tests.simulation.world import Process

# Faults that a connection's ends learn of late.
SILENT = {"cut", "half-open", "pause", "kv-drop"}
# What part of a core a starved process has.
SHARES = (0.2, 0.05, 0.01, 0.004)
STARVED_TIMES = 3  # as long as other faults
SLOWEST_S = 5.0  # what a starved process waits for until it has done what it began
LOST_LEASE_S = 3.0  # that a sweep gives a gateway whose lease is not there
MAX_TOKENS = 20  # of a poison's answer
# Every lease is renewed at least once in this time.
RENEWED_S = 2.0


@dataclass
class PoisonedRequest:
    """A request that crashes who computes token `place` of its answer, and what came of it."""

    fault: Fault
    place: int
    reply: Reply
    task: asyncio.Task[Reply]


class Faults:
    """Does faults to a cluster; `heal` ends all of them."""

    def __init__(self, cluster: SimulatedCluster, random: Random) -> None:
        self.fired: Counter[str] = Counter()
        # Names of processes that were touched by a fault, and kinds of faults that touch no process.
        self.touched: Counter[str] = Counter()
        # Processes that were starved, and for how long all faults of that kind may have held anything up.
        self.starved: set[str] = set()
        self.starved_s = 0.0
        self.paused: set[str] = set()
        # Processes that a fault struck by themselves, and when first.
        self.struck: dict[str, float] = {}
        # By then every connection that has gone dead so far is known to be, what was held up has arrived, and leases
        # were renewed by a clock that has jumped.
        self.noticed_at = 0.0
        self._over_at = 0.0
        # So much later Redis may have renewed the lease of a gateway that had died.
        self.slowest_s = 0.0
        self._cluster = cluster
        self._random = random
        self._healed = False
        self._spoiling: list[Fault] = []
        self._striking: list[Fault] = []
        self.poisons: dict[int, PoisonedRequest] = {}  # by id
        cluster.spoil, cluster.strike = self._spoil, self._strike
        cluster.crashes.crashed = self._crashed

    def plan(self, fault: Fault) -> None:
        """Have it happen at its moment, counted from now."""
        network = self._cluster.network

        def due() -> None:
            if fault.moment.messages:
                network.at_message(fault.moment.messages, lambda: self._do(fault))
            else:
                self._do(fault)

        self._cluster.world.after(fault.moment.at_s, due)

    def heal(self) -> None:
        """From now on nothing is wrong, but what was done stays done."""
        self._healed = True
        cluster = self._cluster
        if cluster.redis.clock_offset_s < 0:  # it jumps once more, forward
            self._over_at = max(self._over_at, cluster.world.now + RENEWED_S)
        noticed_at = min(self.noticed_at, cluster.world.now + NOTICE_S[1])  # of what would have lasted longer
        self.noticed_at = max(noticed_at, self._over_at)
        self._spoiling.clear()
        self._striking.clear()
        cluster.world.fill_log_disk(False)
        cluster.network.mend_all()
        for process in cluster.world.processes:
            if process.alive and process.paused:
                process.resume()
            process.starve(1.0)
            process.disk_late_s = 0.0
        cluster.redis.slowness_s = 0.0
        cluster.redis.clock_offset_s = max(0.0, cluster.redis.clock_offset_s)
        if not cluster.redis.process.alive:
            cluster.redis.start(empty=False)
        for name, process in list(cluster.processes.items()):
            if not process.alive and name not in cluster.guests:
                cluster.start(name)

    def _do(self, fault: Fault) -> None:
        if self._healed:
            return
        act: Callable[[Fault], bool] = getattr(self, "_" + fault.kind.replace("-", "_"))
        if act(fault):
            self.fired[fault.kind] += 1
            if fault.kind not in ("starve", "log-full"):  # that excuses nothing but being late, this not even that
                self.touched.update((fault.kind,) if fault.kind == "poison" else fault.targets or (fault.kind,))
            if len(fault.targets) == 1 and fault.kind not in ("starve", "poison"):
                self.struck.setdefault(fault.targets[0], self._cluster.world.now)
            if fault.kind in SILENT:
                self._silent(fault.seconds)
            self._cluster.world.log("fault", fault.kind, *fault.targets, fault.seconds)

    def _silent(self, for_s: float = 0.0) -> None:
        self.noticed_at = max(self.noticed_at, self._cluster.world.now + for_s + NOTICE_S[1])

    def _later(self, seconds: float, callback: Callable[[], object]) -> None:
        self._cluster.world.after(seconds, lambda: None if self._healed else callback())

    # --- processes ---

    def _process(self, name: str) -> Process:
        return self._cluster.redis.process if name == "redis" else self._cluster.processes[name]

    def _kill(self, fault: Fault) -> bool:
        """And start it again at its address."""
        (name,) = fault.targets
        process = self._process(name)
        if not process.alive:
            return False
        process.kill()
        self._later(fault.seconds, lambda: None if self._process(name).alive else self._cluster.start(name))
        return True

    def _vanish(self, fault: Fault) -> bool:
        """With its host: nobody ever tells how it died."""
        if not self._kill(fault):
            return False
        self._cluster.crashes.forget(fault.targets[0])
        return True

    def _stop(self, fault: Fault) -> bool:
        """In order, as on SIGTERM."""
        (name,) = fault.targets
        process, worker = self._process(name), self._cluster.workers.get(name)
        if not process.alive or worker is None:
            return False
        process.deliver(worker.stop)
        return True

    def _pause(self, fault: Fault) -> bool:
        self.paused.update(fault.targets)
        (name,) = fault.targets
        return self._pause_for(self._process(name), fault.seconds)

    def _pause_for(self, process: Process, seconds: float) -> bool:
        if not process.alive or process.paused:
            return False
        process.pause()
        self._later(seconds, process.resume)
        return True

    def _starve(self, fault: Fault) -> bool:
        """One process, some, or all as on one machine."""
        share, seconds = self._random.choice(SHARES), STARVED_TIMES * fault.seconds
        for name in fault.targets:
            self._process(name).starve(share)
            self._later(seconds, partial(lambda process: process.starve(1.0), self._process(name)))
        self.starved.update(fault.targets)
        self.starved_s += seconds + SLOWEST_S
        return True

    def _log_full(self, fault: Fault) -> bool:
        """The disk that all logs go to."""
        self._cluster.world.fill_log_disk(True)
        self._later(fault.seconds, lambda: self._cluster.world.fill_log_disk(False))
        return True

    def _poison(self, fault: Fault) -> bool:
        """A request that crashes who computes it, at some token of its answer; that is then started again."""
        number = 10 + len(self.poisons)
        place = self._random.choice((0, 0, 1, 2, 5, 11))
        prompt = Prompt((POISON, 10 + place, number, *range(40, 40 + self._random.randrange(20))), MAX_TOKENS)
        reply = Reply()
        task = self._cluster.client.spawn(self._cluster.ask(fault.targets[0], prompt, reply=reply))
        self.poisons[number] = PoisonedRequest(fault, place, reply, task)
        return True

    def _crashed(self, name: str) -> None:
        self.touched[name] += 1
        self.struck.setdefault(name, self._cluster.world.now)
        seconds = max(poison.fault.seconds for poison in self.poisons.values())
        self._later(seconds, lambda: None if self._process(name).alive else self._cluster.start(name))

    # --- connections ---

    def _between(self, fault: Fault) -> list[SimulatedConnection]:
        one, other = map(self._process, fault.targets)
        return self._cluster.network.between(one, other)

    def _cut(self, fault: Fault) -> bool:
        one, other = map(self._process, fault.targets)
        self._cluster.network.cut(one, other)
        self._later(fault.seconds, lambda: self._cluster.network.mend(one, other))
        return bool(self._between(fault)) or "g" in one.name + other.name

    def _half_open(self, fault: Fault) -> bool:
        connections = self._between(fault)
        for connection in connections:
            connection.blackhole(self._process(fault.targets[0]))
        return bool(connections)

    def _reset(self, fault: Fault) -> bool:
        connections = self._between(fault)
        for connection in connections:
            connection.reset("connection reset by peer")
        return bool(connections)

    def _hold(self, fault: Fault) -> bool:
        connections = self._between(fault)
        for connection in connections:
            connection.hold(fault.seconds)
            self._over_at = max(self._over_at, self._cluster.world.now + fault.seconds)
        return bool(connections)

    # --- KV messages ---

    def _kv_drop(self, fault: Fault) -> bool:
        self._spoiling.append(fault)
        self._later(fault.seconds, lambda: self._spoiling.remove(fault))
        return False  # counted for each message

    _kv_duplicate = _kv_reorder = _kv_corrupt = _kv_drop

    def _spoil(self, message: bytes) -> list[tuple[float, bytes]]:
        for fault in self._spoiling:
            if self._random.random() < fault.chance:
                self.fired[fault.kind] += 1
                self.touched[fault.kind] += 1
                self._silent()
                self._cluster.world.log("fault", fault.kind)
                return self._spoiled(fault.kind, message)
        return [(0.0, message)]

    def _spoiled(self, kind: str, message: bytes) -> list[tuple[float, bytes]]:
        if kind == "kv-drop":
            return []
        if kind == "kv-duplicate":
            return [(0.0, message), (self._random.choice((0.0, 0.01)), message)]
        if kind == "kv-reorder":
            return [(self._random.uniform(0.0005, 0.01), message)]
        damaged = bytearray(message)
        damaged[self._random.randrange(len(message))] ^= 1 << self._random.randrange(8)
        return [(0.0, bytes(damaged))]

    # --- disks ---

    def _disk_late(self, fault: Fault) -> bool:
        """Those of all workers."""
        late_s = self._random.choice((0.01, 0.2, 3.0))
        for process in self._cluster.processes.values():
            process.disk_late_s = late_s
            self._later(fault.seconds, partial(setattr, process, "disk_late_s", 0.0))
        return True

    def _disk_fail(self, fault: Fault) -> bool:
        self._striking.append(fault)
        self._later(fault.seconds, lambda: self._striking.remove(fault))
        return False  # counted for each block

    _disk_lose = _disk_damage = _disk_reorder = _disk_repeat = _disk_fail

    def _strike(self) -> str:
        for fault in self._striking:
            if self._random.random() < fault.chance:
                self.fired[fault.kind] += 1
                self.touched[fault.kind] += 1
                self._cluster.world.log("fault", fault.kind)
                return fault.kind
        return ""

    # --- Redis ---

    def _redis_kill(self, fault: Fault) -> bool:
        redis = self._cluster.redis
        if not redis.process.alive:
            return False
        redis.process.kill()
        self._later(fault.seconds, lambda: None if redis.process.alive else redis.start(empty=fault.empty))
        return True

    def _redis_empty(self, fault: Fault) -> bool:
        self._cluster.redis.empty()
        return True

    def _redis_garbage(self, fault: Fault) -> bool:
        """One value, of whatever there is."""
        spoilt = self._cluster.redis.spoil(self._random)
        self._cluster.world.log("spoilt", spoilt)
        self.slowest_s = max(self.slowest_s, LOST_LEASE_S)
        return bool(spoilt)

    def _redis_slow(self, fault: Fault) -> bool:
        redis = self._cluster.redis
        redis.slowness_s = self._random.choice((0.01, 0.2, 0.7))
        self.slowest_s = max(self.slowest_s, redis.slowness_s)
        self._later(fault.seconds, lambda: setattr(redis, "slowness_s", 0.0))
        return True

    def _redis_pause(self, fault: Fault) -> bool:
        return self._pause_for(self._cluster.redis.process, fault.seconds)

    def _redis_clock(self, fault: Fault) -> bool:
        self._cluster.redis.clock_offset_s += self._random.choice((-1.0, 1.0)) * fault.seconds
        self._over_at = max(self._over_at, self._cluster.world.now + RENEWED_S)
        return True
