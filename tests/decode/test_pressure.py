"""Pools of a few blocks and requests of every size, on simulated time: each is refused at once or comes to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from services.decode.block_queue import BlockQueue
from tandem.engine import Engine, EngineConfig, Request, SampledToken, SamplingParams, SequenceOutput, StepTime
from tandem.worker import Added, Ended, Event, InlineEngine
from tests.simulation.world import World

BLOCK, BLOCK_BYTES, BLOCKS = 4, 4 * 32, 6  # of the null engine
MAX_TOKENS = BLOCK * BLOCKS
SEEDS, REQUESTS = 60, 12
LONGEST_STEP_S = 0.012


class Pressure:
    """An engine, the line before it, and a prefill engine that fills what is reserved."""

    def __init__(self, config: EngineConfig, oracle: Engine, random: Random) -> None:
        self.port = InlineEngine(replace(config, swap_memory=random.choice((0, 3, BLOCKS)) * BLOCK_BYTES))
        self.prefill = oracle
        self.random = random
        self.admission = BlockQueue(self.port)
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, asyncio.Future[None]] = {}
        self.answers: dict[str, asyncio.Future[Added | Ended]] = {}
        self.port.start(self._on_events, self._died)

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if not isinstance(event, SequenceOutput):
                self.admission.leave(event.request_id)
                self.answers[event.request_id].set_result(event)
                continue
            assert event.error is None
            self.got[event.request_id] += [token.token_id for token in event.tokens]
            if event.finished:
                self.ended[event.request_id].set_result(None)
        self.admission.look_again()

    async def _reserve(self, request: Request) -> Added | Ended:
        answer = self.answers[request.request_id] = asyncio.get_running_loop().create_future()
        return self.admission.enter(request) or await answer

    def _died(self, error: BaseException) -> None:
        raise error

    async def ask(self, request: Request) -> str:
        await asyncio.sleep(self.random.random() * 0.3)
        name, length = request.request_id, len(request.token_ids) + request.sampling.max_tokens
        self.got[name], self.ended[name] = [], asyncio.get_running_loop().create_future()
        asked = asyncio.get_running_loop().time()
        if self.random.random() < 0.3 and length <= MAX_TOKENS:
            await self.port.call(lambda engine: engine.add(request))
        else:
            added = await self._reserve(request)
            if isinstance(added, Ended):
                assert isinstance(added.error, ValueError)
                assert asyncio.get_running_loop().time() - asked <= LONGEST_STEP_S
                return "refused"
            await asyncio.sleep(self.random.random() * 0.1)
            if self.random.random() < 0.2:
                await self._abort(name)
                return "aborted"
            first = self._land(request, added.num_cached_tokens, list(added.block_ids or ()))
            self.got[name].append(first.token_id)
            if await self.port.call(lambda engine: engine.join(name, first)):
                self.ended[name].set_result(None)
                self.admission.look_again()
        if self.random.random() < 0.1:
            await asyncio.sleep(self.random.random() * 0.1)
            if not self.ended[name].done():
                await self._abort(name)
                return "aborted"
        await self.ended[name]
        assert self.got[name] == answer(self.prefill, request)
        return "ended"

    async def _abort(self, name: str) -> None:
        await self.port.call(lambda engine: engine.abort(name))
        self.admission.look_again()

    def _land(self, request: Request, cached: int, blocks: list[int]) -> SampledToken:
        kv_cache = self.port.engine.kv_cache

        class LateLanding:
            reading = False

            def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
                kv_cache[layer][blocks[first_block : first_block + len(block_ids)]] = kv[list(block_ids)]

        self.prefill.add(request, sink=LateLanding(), first_block=cached // BLOCK, prefill_only=True)
        outputs = self.prefill.step()
        while not outputs:
            outputs = self.prefill.step()
        return outputs[0].tokens[0]


def answer(engine: Engine, request: Request) -> list[int]:
    engine.add(replace(request, request_id="alone"))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token.token_id for output in engine.step() for token in output.tokens]
    return tokens


def requests(random: Random) -> list[Request]:
    """Some of them longer than the pool; many that fill it; some that share a beginning."""
    shared = random.choices(range(3, 4096), k=8)
    return [
        Request(
            f"r{i}",
            shared[: random.choice((0, 4, 8))] + random.choices(range(3, 4096), k=random.randint(1, 12)),
            SamplingParams(max_tokens=random.choice((1, 2, 9, 16)), temperature=1.0, seed=i),
            random.choice((-10, 0, 0, 10)),
        )
        for i in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def config(demo_model: Path) -> EngineConfig:
    return EngineConfig(
        demo_model, "null", num_blocks=BLOCKS, block_size=BLOCK, max_num_batched_tokens=8, max_num_seqs=4,
        likely_answer=4, null=StepTime(),
    )  # fmt: skip


def test_each_is_refused_at_once_or_comes_to_its_end(config: EngineConfig) -> None:
    """A wait that nothing would ever end is what the simulated time stands still for."""
    oracle = Engine(replace(config, num_blocks=64), sleep=lambda _: None)
    preempted = swapped = 0
    for seed in range(SEEDS):
        random = Random(seed)
        asked = requests(random)
        with World(seed) as world:
            process = world.process("decode")

            async def play(random: Random = random, asked: list[Request] = asked) -> tuple[Pressure, list[str]]:
                pressure = Pressure(config, oracle, random)
                return pressure, await asyncio.gather(*map(pressure.ask, asked))

            pressure, ends = world.run(process, play(), limit_s=60)
            assert not world.errors
            fit = [len(r.token_ids) + r.sampling.max_tokens <= MAX_TOKENS for r in asked]
            assert [end != "refused" for end in ends] == fit
            stats = pressure.port.engine.stats()
            assert stats.free_blocks == BLOCKS
            pressure.port.engine.check_integrity()
            preempted, swapped = preempted + stats.num_preempted, swapped + stats.num_swapped
    assert preempted > swapped > SEEDS
