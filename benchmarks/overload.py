"""`python -m benchmarks.overload`: what a gateway makes of more work than fits.

A prefill and a decode worker (null engine) that hold about 21 answers at once. First their peak: so many clients that
each asks again as soon as it has its answer. Then clients that come at random at a multiple of that, come what may,
with and without deadlines. Good is an answer that came whole, its first token within TTFT_S (or all of it
within the deadline). The first seconds of each load are not counted.

Refusals are timed twice: by the clients, whose process shares the cores with everything else, and inside the gateway,
from a request's arrival to its 429. Ends with status 1 where goodput or the gateway's refusals miss what is wanted.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from grpc import StatusCode, aio
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fleet import MODEL, Address, Fleet, running
from benchmarks.models import OUT
from benchmarks.results import percentile
from tandem import rpc
from tandem.engine import StepTime
from tandem.v1 import llm_pb2, llm_pb2_grpc

PROMPT_TOKENS, NEW_TOKENS, TTFT_S = 64, 32, 2.0
WARM_S, COUNTED_S, CLIENTS = 6.0, 12.0, 24
GOODPUT, REFUSED_S = 0.95, 0.010
REFUSALS = "tandem_refused_after_seconds"
LOADS = ((2.0, None), (7.5, None), (2.0, 3.0), (7.5, 3.0))
FLEET = Fleet(
    prefill=1, decode=1, decode_blocks=128, gateways=(("tandem", "auto"),),
    gateway_settings={"classes": {"interactive": {"ttft_s": TTFT_S}}}, step_time=StepTime(decode_step_s=0.05),
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """Counts and times, in seconds, of the requests that began in the counted seconds."""

    load: str
    good: int = 0
    late: int = 0
    refused: int = 0
    cut: int = 0  # ended by an error in mid-answer
    refused_after: list[float] = field(default_factory=list)
    refused_at_once: float = 1.0  # share, inside the gateway, within REFUSED_S

    def misses(self, peak: float) -> list[str]:
        """The bars that it misses, in words."""
        wrong = []
        if peak and self.good / COUNTED_S < GOODPUT * peak:
            wrong.append(f"{self.load}: goodput is under {GOODPUT:.0%} of its peak")
        if self.refused_at_once < 0.99:
            wrong.append(f"{self.load}: more than 1 % of refusals took the gateway over {1000 * REFUSED_S:.0f} ms")
        return wrong

    def line(self, peak: float) -> str:
        rate = self.good / COUNTED_S
        p99 = ""
        if self.refused_after:
            within = f"{self.refused_at_once:.1%} within {1000 * REFUSED_S:.0f} ms in the gateway"
            p99 = f", {within}, p99 at the client {1000 * percentile(self.refused_after, 99):.1f} ms"
        share = f" ({rate / peak:.0%} of peak)" if peak else ""
        return (
            f"{self.load:<22} goodput {rate:5.1f}/s{share}; late {self.late}, cut {self.cut}, 429 {self.refused}{p99}"
        )


class Load:
    def __init__(self, channel: aio.Channel, tally: Tally, deadline_s: float | None) -> None:
        self._service: Any = llm_pb2_grpc.LLMServiceStub(channel)
        self._tally, self._deadline_s = tally, deadline_s
        self._chance = random.Random(1)
        self._start = asyncio.get_running_loop().time()

    async def closed(self) -> None:
        async def client() -> None:
            while self._age() < WARM_S + COUNTED_S:
                await self._ask()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def open(self, rate: float) -> None:
        tasks, due = set[asyncio.Task[None]](), 0.0
        while due < WARM_S + COUNTED_S:
            due += self._chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - self._age()))
            tasks.add(asyncio.create_task(self._ask()))
        await asyncio.gather(*tasks)

    async def _ask(self) -> None:
        born, first, tally = self._age(), 0.0, self._tally
        ids = self._chance.choices(range(1, 2000), k=PROMPT_TOKENS)
        sampling = llm_pb2.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        asked = llm_pb2.GenerateRequest(model=MODEL, token_ids=llm_pb2.TokenIds(ids=ids), sampling=sampling)
        end = StatusCode.OK
        try:
            async for _ in self._service.Generate(asked, timeout=self._deadline_s):
                first = first or self._age()
        except aio.AioRpcError as error:
            end = error.code()
        if not WARM_S <= born < WARM_S + COUNTED_S:
            return
        if end is StatusCode.OK:
            in_time = self._deadline_s is not None or first - born <= TTFT_S
            tally.good, tally.late = tally.good + in_time, tally.late + (not in_time)
        elif end is StatusCode.RESOURCE_EXHAUSTED:
            tally.refused += 1
            tally.refused_after.append(self._age() - born)
        else:
            tally.cut, tally.late = tally.cut + bool(first), tally.late + (not first)

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._start


async def measure(address: Address) -> AsyncIterator[Tally]:
    async with rpc.channel(address.grpc) as channel:
        peak = Tally(f"peak, {CLIENTS} clients")
        await Load(channel, peak, None).closed()
        yield peak
        for times, deadline_s in LOADS:
            tally = Tally(f"{times:g}x, " + (f"deadline {deadline_s:g} s" if deadline_s else "no deadline"))
            before = await refusals(address.http)
            await Load(channel, tally, deadline_s).open(times * peak.good / COUNTED_S)
            fast, all_ = (after - earlier for after, earlier in zip(await refusals(address.http), before, strict=True))
            tally.refused_at_once = fast / all_ if all_ else 1.0
            yield tally


async def refusals(address: str) -> tuple[float, float]:
    """Those that left the gateway within REFUSED_S, and all, since its start."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{address}/metrics")).text
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == REFUSALS
        for sample in family.samples
    }
    return samples[f"{REFUSALS}_bucket", str(REFUSED_S)], samples[f"{REFUSALS}_count", None]


async def run() -> list[str]:
    """Runs the load; returns the bars that it misses."""
    tallies: list[Tally] = []
    async with running(FLEET) as (address,):
        async for tally in measure(address):
            peak = tallies[0].good / COUNTED_S if tallies else 0.0
            tallies.append(tally)
            print(tally.line(peak), flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "overload.json").write_text(json.dumps([asdict(tally) for tally in tallies], indent=2))
    best = tallies[0].good / COUNTED_S
    return [miss for tally in tallies[1:] for miss in tally.misses(best)]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        if missed := asyncio.run(run()):
            raise SystemExit("\n".join(missed))
