"""`python -m benchmarks.overload`: what a gateway makes of more work than fits.

A prefill and a decode worker (null engine), whose blocks hold about 21 answers at once, or whose batch has 32 seats
beside many blocks. First their peak: so many clients that each asks again as soon as it has its answer. Then clients
that come at random at a multiple of that, come what may: of one class, with and without deadlines, or of all three,
with deadlines or none and answers of three lengths. Good is an answer that came whole, its first token within its
target (or all of it within the deadline); goodput is the tokens of those that end in the counted seconds, so what waits
for the load's end is none of it. The first seconds of each load are not counted.

Refusals are timed twice: by the clients, whose process shares the cores with everything else, and inside the gateway,
from a request's arrival to its 429. With --simulated all of it is in made-up time, which no other work of the machine
can touch. Ends with status 1 where goodput, the gateway's refusals, answers that are cut or refusals behind the load's
end miss what is wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import httpx
from grpc import StatusCode, aio
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fleet import MODEL, NullFleet, in_made_up_time, running
from benchmarks.models import OUT
from benchmarks.results import percentile
from tandem import rpc
from tandem.engine import StepTime
from tandem.v1 import llm_pb2, llm_pb2_grpc

PROMPT_TOKENS, NEW_TOKENS, TTFT_S = 64, 32, 2.0
WARM_S, COUNTED_S = 6.0, 12.0
GOODPUT, REFUSED_S, CUT, RECOVERED_S = 0.95, 0.010, 0.01, 0.5
REFUSALS = "tandem_refused_after_seconds"
STEP_TIME = StepTime(decode_step_s=0.05)


@dataclass(frozen=True)
class LoadKind:
    """Answers of `new_tokens`, with each of the deadlines, of each class with its target to the first token."""

    name: str
    new_tokens: tuple[int, ...] = (NEW_TOKENS,)
    deadlines_s: tuple[float | None, ...] = (None,)
    ttft_s: Mapping[int, float | None] = field(default_factory=lambda: {llm_pb2.PRIORITY_INTERACTIVE: TTFT_S})


PATIENT, HASTY = LoadKind("no deadline"), LoadKind("deadline 3 s", deadlines_s=(3.0,))
MIXED = LoadKind(
    "three classes", (16, 32, 48), (None, 3.0, 8.0),
    {llm_pb2.PRIORITY_REALTIME: 1.0, llm_pb2.PRIORITY_INTERACTIVE: 5.0, llm_pb2.PRIORITY_BATCH: None},
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One fleet, as many clients as bring it to its peak, and the loads on it: times the peak, and of what."""

    name: str
    fleet: NullFleet
    clients: int
    loads: tuple[tuple[float, LoadKind], ...]


TRIALS = (
    Trial(
        "few blocks",
        NullFleet(
            prefill=1, decode=1, decode_blocks=128, gateways=(("tandem", "auto"),), step_time=STEP_TIME,
            gateway_settings={"classes": {"interactive": {"ttft_s": TTFT_S}}},
        ),
        24,
        ((2.0, PATIENT), (7.5, PATIENT), (2.0, HASTY), (7.5, HASTY)),
    ),
    Trial(
        "few seats",
        NullFleet(
            prefill=1, decode=1, decode_seqs=32, gateways=(("tandem", "auto"),), step_time=STEP_TIME,
            gateway_settings={"classes": {"interactive": {"ttft_s": 5.0}, "realtime": {"ttft_s": 1.0}}},
        ),
        40,
        ((3.0, MIXED), (7.5, MIXED), (15.0, MIXED)),
    ),
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """Counts and times, in seconds, of the requests that began in the counted seconds."""

    load: str
    tokens: int = 0  # of good answers that ended in the counted seconds
    good: int = 0
    late: int = 0
    refused: int = 0
    cut: int = 0  # ended by an error in mid-answer
    refused_after: list[float] = field(default_factory=list)
    refused_at_once: float = 1.0  # share, inside the gateway, within REFUSED_S
    refused_behind_s: float = 0.0  # the last one, after the last request

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / COUNTED_S

    def misses(self, peak: float) -> list[str]:
        """The bars that it misses, in words."""
        wrong = []
        if self.goodput < GOODPUT * peak:
            wrong.append(f"{self.load}: goodput is under {GOODPUT:.0%} of its peak")
        if self.refused_at_once < 0.99:
            wrong.append(f"{self.load}: more than 1 % of refusals took the gateway over {1000 * REFUSED_S:.0f} ms")
        if peak and self.cut > CUT * (self.good + self.late):
            wrong.append(f"{self.load}: {self.cut} answers were cut in the middle")
        if self.refused_behind_s > RECOVERED_S:
            wrong.append(f"{self.load}: a request was refused {self.refused_behind_s:.1f} s after the last one came")
        return wrong

    def line(self, peak: float) -> str:
        p99 = ""
        if self.refused_after:
            within = f"{self.refused_at_once:.1%} within {1000 * REFUSED_S:.0f} ms in the gateway"
            p99 = f", {within}, p99 at the client {1000 * percentile(self.refused_after, 99):.1f} ms"
        share = f" ({self.goodput / peak:.0%} of peak)" if peak else ""
        return (
            f"{self.load:<36} goodput {self.goodput:5.1f} tokens/s{share}; good {self.good}, late {self.late}, "
            f"cut {self.cut}, 429 {self.refused}{p99}, the last {self.refused_behind_s:.2f} s behind the load"
        )


# Refusals that left the gateway within REFUSED_S, and all, since its start.
Timed = Callable[[], Awaitable[tuple[float, float]]]


class OpenLoad:
    def __init__(self, service: Any, model: str, tally: Tally, kind: LoadKind) -> None:
        self._service, self._model = service, model
        self._tally, self._kind = tally, kind
        self._chance = random.Random(1)
        self._start = asyncio.get_running_loop().time()
        self._last = self._start  # when the last request began

    async def closed(self, clients: int) -> None:
        async def client() -> None:
            while self._age() < WARM_S + COUNTED_S:
                await self._ask()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, rate: float) -> None:
        tasks, due = set[asyncio.Task[None]](), 0.0
        while due < WARM_S + COUNTED_S:
            due += self._chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - self._age()))
            tasks.add(asyncio.create_task(self._ask()))
            self._last = self._age()
        await asyncio.gather(*tasks)

    async def _ask(self) -> None:
        kind, chance = self._kind, self._chance
        priority, ttft_s = chance.choice(list(kind.ttft_s.items()))
        deadline_s, tokens = chance.choice(kind.deadlines_s), chance.choice(kind.new_tokens)
        asked = llm_pb2.GenerateRequest(
            model=self._model, token_ids=llm_pb2.TokenIds(ids=chance.choices(range(1, 2000), k=PROMPT_TOKENS)),
            sampling=llm_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
            priority=llm_pb2.Priority.Name(priority),
        )  # fmt: skip
        born, first, end = self._age(), 0.0, StatusCode.OK
        try:
            async for _ in self._service.Generate(asked, timeout=deadline_s):
                first = first or self._age()
        except aio.AioRpcError as error:
            end = error.code()
        in_time = deadline_s is not None or ttft_s is None or first - born <= ttft_s
        if end is StatusCode.OK and in_time and _is_counted(self._age()):
            self._tally.tokens += tokens
        if end is StatusCode.RESOURCE_EXHAUSTED:
            self._tally.refused_behind_s = max(0.0, self._age() - self._last)
        if _is_counted(born):
            self._count(end, born, first, in_time)

    def _count(self, end: StatusCode, born: float, first: float, in_time: bool) -> None:
        tally = self._tally
        if end is StatusCode.OK:
            tally.good, tally.late = tally.good + in_time, tally.late + (not in_time)
        elif end is StatusCode.RESOURCE_EXHAUSTED:
            tally.refused += 1
            tally.refused_after.append(self._age() - born)
        else:
            tally.cut, tally.late = tally.cut + bool(first), tally.late + (not first)

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._start


def _is_counted(age: float) -> bool:
    return WARM_S <= age < WARM_S + COUNTED_S


async def measure(trial: Trial, service: Any, model: str, timed: Timed) -> AsyncIterator[Tally]:
    peak = Tally(f"{trial.name}: peak, {trial.clients} clients")
    await OpenLoad(service, model, peak, PATIENT).closed(trial.clients)
    yield peak
    for times, kind in trial.loads:
        tally = Tally(f"{trial.name}: {times:g}x, {kind.name}")
        before = await timed()
        await OpenLoad(service, model, tally, kind).open(times * (peak.good + peak.late) / COUNTED_S)
        fast, all_ = (after - earlier for after, earlier in zip(await timed(), before, strict=True))
        if not all_:  # no gateway that says
            fast, all_ = sum(after <= REFUSED_S for after in tally.refused_after), len(tally.refused_after)
        tally.refused_at_once = fast / all_ if all_ else 1.0
        yield tally


async def refusals(address: str) -> tuple[float, float]:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{address}/metrics")).text
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == REFUSALS
        for sample in family.samples
    }
    fast, all_ = (f"{REFUSALS}_bucket", str(REFUSED_S)), (f"{REFUSALS}_count", None)
    return samples.get(fast, 0.0), samples.get(all_, 0.0)  # there are none before the first


async def refusals_untold() -> tuple[float, float]:
    return 0.0, 0.0


async def tallied(trial: Trial, service: Any, model: str, timed: Timed = refusals_untold) -> list[Tally]:
    tallies: list[Tally] = []
    async for tally in measure(trial, service, model, timed):
        tallies.append(tally)
        print(tally.line(tallies[0].goodput if tally is not tallies[0] else 0.0), flush=True)
    return tallies


async def on_processes(trial: Trial) -> list[Tally]:
    async with running(trial.fleet) as (address,), rpc.channel(address.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        return await tallied(trial, service, MODEL, lambda: refusals(address.http))


def main() -> list[str]:
    """Runs the loads; returns the bars that they miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", action="store_true", help="in made-up time")
    names = {trial.name: trial for trial in TRIALS}
    parser.add_argument("--only", choices=names, help="one of the two fleets")
    options = parser.parse_args()
    wrong, all_ = list[str](), list[Tally]()
    for trial in TRIALS:
        if options.only in (None, trial.name):
            if options.simulated:
                best, *others = in_made_up_time(trial.fleet, partial(tallied, trial))
            else:
                best, *others = asyncio.run(on_processes(trial))
            wrong += [miss for tally in others for miss in tally.misses(best.goodput)]
            all_ += [best, *others]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "overload.json").write_text(json.dumps([asdict(tally) for tally in all_], indent=2), encoding="utf-8")
    return wrong


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        if missed := main():
            raise SystemExit("\n".join(missed))
