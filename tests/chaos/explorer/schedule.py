"""The input of a run: a cluster's shape, requests, and faults, all drawn from one seed.

Swarm testing: each schedule draws from a random subset of the kinds of faults, so that they also come alone and in all
company. A moment is a time, or so many messages behind a time: faults gather where messages are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from services.gateway.settings import Disaggregation
from tandem.v1 import llm_pb2
from tests.simulation.cluster import ClusterShape, Prompt

# Requests and faults begin within so many seconds.
BUSY_S = 1.5
MAX_REQUESTS, MAX_FAULTS = 8, 4
# A crowd of requests for long answers comes all at once, to every other cluster whose blocks are few.
CROWD, CROWD_S, CHANCE_OF_CROWD = 4, 0.2, 0.5
VOCABULARY = 4096
OF_CLUSTERS = (
    "kill", "vanish", "pause", "stop", "cut", "half-open", "reset", "hold",
    "kv-drop", "kv-duplicate", "kv-reorder", "kv-corrupt",
    "redis-kill", "redis-empty", "redis-slow", "redis-pause", "redis-clock", "redis-garbage",
    "starve",
)  # fmt: skip
OF_DISKS = "disk-late", "disk-fail", "disk-lose", "disk-damage", "disk-reorder", "disk-repeat"
KINDS = (*OF_CLUSTERS, *OF_DISKS, "poison", "log-full")
CHANCE_OF_POISON, CHANCE_OF_LOG_FULL, CHANCE_OF_DISK = 0.2, 0.2, 0.5
CHANCE_OF_KIND = 0.3
CHANCE_OF_TURNS, MOST_TURNS = 0.3, 3
CHANCE_OF_VISITS = 0.1
# Prompts come again, when caches may have lost them and disks have not.
CHANCE_OF_RETURN, RETURNS_S = 0.6, (0.5, 4.0)
PRIORITIES = (llm_pb2.PRIORITY_REALTIME, *2 * (llm_pb2.PRIORITY_INTERACTIVE,), llm_pb2.PRIORITY_BATCH)


@dataclass(frozen=True)
class Moment:
    """So many messages behind a time."""

    at_s: float
    messages: int = 0


@dataclass(frozen=True)
class ScheduledRequest:
    gateway: str
    at_s: float
    prompt: Prompt
    abort: Moment | None = None
    read_pause_s: float = 0.0
    turns: tuple[tuple[int, ...], ...] = ()  # what its client says behind each whole answer: the next turn's new tokens
    is_later: bool = False  # its prompt, or its beginning, was asked before

    def next_turn(self, answer: Sequence[int]) -> ScheduledRequest | None:
        """Its prompt is this one's, the answer and what is new."""
        if not self.turns:
            return None
        prompt = replace(self.prompt, token_ids=(*self.prompt.token_ids, *answer, *self.turns[0]), timeout_s=None)
        return replace(self, prompt=prompt, abort=None, turns=self.turns[1:], is_later=True)


@dataclass(frozen=True)
class Fault:
    kind: str
    moment: Moment
    targets: tuple[str, ...]
    seconds: float  # how long it lasts, or until what was killed is started again
    chance: float = 1.0  # of each message, where it is of messages
    empty: bool = False  # without its memory


@dataclass(frozen=True)
class Visit:
    """A worker of another model joins and leaves; None: it is there from the start, or leaves at the end."""

    name: str
    model: str
    joins_s: float | None
    leaves_s: float | None
    killed: bool


@dataclass(frozen=True)
class Schedule:
    seed: int
    shape: ClusterShape
    requests: tuple[ScheduledRequest, ...]
    faults: tuple[Fault, ...]
    visits: tuple[Visit, ...] = ()

    def only(self, requests: frozenset[int], faults: frozenset[int], luck: int = 0) -> Schedule:
        """The same without the rest, its randomness another for each `luck`."""
        return replace(
            self,
            seed=self.seed + luck * 2**32,
            requests=tuple(request for i, request in enumerate(self.requests) if i in requests),
            faults=tuple(fault for i, fault in enumerate(self.faults) if i in faults),
        )


# Prompts that take long to prefill, in many steps.
SLOW: dict[str, Any] = {"prefill_tokens_per_s": 400.0, "max_num_batched_tokens": 8}
# With fewer blocks, requests may have to wait for one another.
AMPLE_BLOCKS = 64
TIGHT: dict[str, Any] = {"num_blocks": 20, "timeout_s": 10.0}
# A cluster in which no other worker can do the prefill worker's part.
SOLE_PREFILL = ClusterShape(decodes=2, disaggregation=Disaggregation.REQUIRE, **SLOW)
SHAPES = (
    ClusterShape(**SLOW),
    ClusterShape(decodes=2, launched=False),
    ClusterShape(prefills=2, decodes=2, disk_blocks=256, **SLOW),
    ClusterShape(gateways=2, decodes=2),
    ClusterShape(decodes=2, disk_blocks=40, **TIGHT, **SLOW),
    ClusterShape(**TIGHT),
    ClusterShape(decodes=2, disaggregation=Disaggregation.AUTO),
    ClusterShape(prefills=2, decodes=2, disaggregation=Disaggregation.REQUIRE, **SLOW),
)


def schedule_of(seed: int, kinds: Sequence[str] = (), shapes: Sequence[ClusterShape] = SHAPES) -> Schedule:
    """`kinds`: where given, its faults are of these kinds, and there are some; with disks, where one is a disk's."""
    if shapes is SHAPES and not set(kinds).isdisjoint(OF_DISKS):
        shapes = [shape for shape in SHAPES if shape.disk_blocks]
    random = Random(seed)
    shape = random.choice(shapes)
    crowded = shape.num_blocks < AMPLE_BLOCKS and random.random() < CHANCE_OF_CROWD
    requests = tuple(
        _request(random, shape, crowded) for _ in range(random.randint(CROWD if crowded else 1, MAX_REQUESTS))
    )
    num_faults = random.randint(1 if kinds else 0, MAX_FAULTS)
    drawn = kinds or [kind for kind in OF_CLUSTERS if random.random() < CHANCE_OF_KIND] or OF_CLUSTERS
    faults = [_fault(random, random.choice(drawn), shape) for _ in range(num_faults)]
    if not kinds and random.random() < CHANCE_OF_POISON:
        faults.append(_fault(random, "poison", shape))
    if not kinds and random.random() < CHANCE_OF_LOG_FULL:
        faults.append(_fault(random, "log-full", shape))
    if not kinds and shape.disk_blocks and random.random() < CHANCE_OF_DISK:
        faults.append(_fault(random, random.choice(OF_DISKS), shape))
    requests = _with_turns(Random(f"{seed} turns"), requests)
    if shape.disk_blocks:
        requests += _returning(Random(f"{seed} returns"), requests)
    visits, requests = ((), requests) if kinds else _with_visits(Random(f"{seed} visits"), requests)
    return Schedule(seed, shape, requests, tuple(faults), visits)


def _with_visits(
    random: Random, requests: tuple[ScheduledRequest, ...]
) -> tuple[tuple[Visit, ...], tuple[ScheduledRequest, ...]]:
    """One model joins and another one leaves; some of the requests are for these."""
    if random.random() >= CHANCE_OF_VISITS:
        return (), requests
    joins_s, stays_s = random.uniform(0, BUSY_S), random.choice((None, random.uniform(0.1, 3.0)))
    visits = (
        Visit("x0", "joining", joins_s, stays_s and joins_s + stays_s, random.random() < 0.5),
        Visit("y0", "leaving", None, random.uniform(0, BUSY_S), random.random() < 0.5),
    )
    models = [random.choice((None, None, *visits)) for _ in requests]
    return visits, tuple(
        replace(request, prompt=replace(request.prompt, model=visit.model)) if visit else request
        for request, visit in zip(requests, models, strict=True)
    )


def _with_turns(random: Random, requests: tuple[ScheduledRequest, ...]) -> tuple[ScheduledRequest, ...]:
    """Some of them begin conversations."""
    said = [random.randint(1, MOST_TURNS) if random.random() < CHANCE_OF_TURNS else 0 for _ in requests]
    turns = [tuple(tuple(random.choices(range(3, VOCABULARY), k=random.randint(1, 6))) for _ in range(n)) for n in said]
    return tuple(replace(request, turns=more) for request, more in zip(requests, turns, strict=True))


def _returning(random: Random, requests: tuple[ScheduledRequest, ...]) -> tuple[ScheduledRequest, ...]:
    """Some of them once more, later."""
    chosen = [request for request in requests if random.random() < CHANCE_OF_RETURN]
    return tuple(
        replace(one, at_s=round(one.at_s + random.uniform(*RETURNS_S), 3), abort=None, is_later=True) for one in chosen
    )


def names(shape: ClusterShape) -> list[str]:
    counts = {"g": shape.gateways, "p": shape.prefills, "d": shape.decodes}
    return [f"{role}{i}" for role, count in counts.items() for i in range(count)]


def _request(random: Random, shape: ClusterShape, crowded: bool) -> ScheduledRequest:
    beginning = Random(random.randrange(3)).choices(range(3, VOCABULARY), k=random.choice((0, 0, 8, 17)))
    rest = random.choices(range(3, VOCABULARY), k=random.randint(1, 20))
    temperature, seed = random.choice(((0.0, 0), (0.8, random.randrange(1000))))
    prompt = Prompt(
        token_ids=(*beginning, *rest),
        max_tokens=random.choice((20, 40) if crowded else (1, 2, 5, 10, 20, 40)),
        temperature=temperature,
        seed=seed,
        timeout_s=random.choice((None, None, 4.0, 8.0, round(random.uniform(0.001, 0.8), 3))),
        cache_salt=random.choice(("", "", "a", f"own-{random.getrandbits(32)}")),
        priority=random.choice(PRIORITIES),
        patient=random.random() < 0.5,
    )
    return ScheduledRequest(
        gateway=f"g{random.randrange(shape.gateways)}",
        at_s=round(random.uniform(0, CROWD_S if crowded else BUSY_S), 3),
        prompt=prompt,
        abort=_moment(random, 0.0, 0.8) if random.random() < 0.25 else None,
        read_pause_s=0.0 if crowded else random.choice((0.0, 0.0, 0.0, 0.02, 0.2)),
    )


def _moment(random: Random, first_s: float, last_s: float) -> Moment:
    return Moment(round(random.uniform(first_s, last_s), 3), random.choice((0, random.randrange(1, 60))))


def _fault(random: Random, kind: str, shape: ClusterShape) -> Fault:
    everybody = names(shape)
    count = 1 if kind in ("kill", "vanish", "pause", "stop", "poison") else 2
    count = random.choice((1, 2, len(everybody))) if kind == "starve" else count
    workers = [name for name in everybody if name[0] != "g"]
    among = workers if kind in ("stop", "vanish") else everybody[: shape.gateways] if kind == "poison" else everybody
    targets = random.sample(among, count)
    if kind in ("cut", "half-open", "reset", "hold") and random.random() < 0.2:
        targets[1] = "redis"
    return Fault(
        kind=kind,
        moment=_moment(random, 0.0, BUSY_S),
        targets=() if kind.startswith(("kv", "redis", "log", "disk")) else tuple(targets),
        seconds=round(random.choice((random.uniform(0.001, 0.3), random.uniform(0.3, 3.0))), 3),
        chance=random.choice((0.02, 0.1, 0.5, 1.0)),
        empty=random.random() < 0.5,
    )
