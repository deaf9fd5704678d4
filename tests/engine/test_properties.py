"""Whatever arrives, ends early or is handed over, in a pool far too small: the right tokens, and every block free."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine import Engine, Request, SampledToken, SamplingParams
from tandem.speculative import Speculative
from tests.engine.test_handoff import CopySink
from tests.engine.tiny import BLOCK_BYTES, Families, assert_idle, generate, make_engine, prompt_of, run, sampled

LONGEST_ANSWER = 14
KINDS = ("add", "add", "reserve", "abort", "step", "step")


@dataclass(frozen=True)
class Deed:
    """One thing to do: a request of some size, or an abort of the `victim`th live one, or some steps."""

    kind: str
    base: int
    length: int
    max_tokens: int
    seed: int
    priority: int
    victim: int


JOBS = st.builds(
    Deed,
    kind=st.sampled_from(KINDS),
    base=st.integers(0, 1),
    length=st.integers(1, 18),
    max_tokens=st.integers(1, LONGEST_ANSWER),
    seed=st.integers(0, 2),
    priority=st.integers(0, 1),
    victim=st.integers(0, 5),
)


class Oracle:
    """Answers of an engine that has room for everything and does one request at a time."""

    def __init__(self, path: Path) -> None:
        self.engine = make_engine(path, enable_prefix_caching=False, max_num_batched_tokens=64)
        self.answer = cache(self._answer)

    def request(self, name: str, job: Deed) -> Request:
        params = SamplingParams(job.max_tokens, temperature=float(job.seed), seed=job.seed)
        return Request(name, prompt_of(18, job.base)[: job.length], params, priority=job.priority)

    def _answer(self, base: int, length: int, seed: int) -> list[int]:
        job = Deed("add", base, length, LONGEST_ANSWER, seed, 0, 0)
        request = self.request("oracle", job)
        return generate(self.engine, request.token_ids, request.sampling)


@dataclass
class Session:
    """A tiny engine under test and what it is expected to say."""

    engine: Engine
    prefill: Engine
    oracle: Oracle
    expected: dict[str, list[int]] = field(default_factory=dict)
    got: dict[str, list[int]] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    parked: dict[str, SampledToken] = field(default_factory=dict)

    def do(self, number: int, job: Deed) -> None:
        name = str(number)
        if job.kind == "step":
            self.step()
        elif job.kind == "abort":
            self.abort(job.victim)
        else:
            request = self.oracle.request(name, job)
            entered = self.add(request) if job.kind == "add" else self.reserve(request)
            if entered:
                self.expected[name] = self.oracle.answer(job.base, job.length, job.seed)[: job.max_tokens]
                self.live.append(name)
        self.engine.check_integrity()

    def add(self, request: Request) -> bool:
        self.got[request.request_id] = []
        self.engine.add(request)
        return True

    def reserve(self, request: Request) -> bool:
        cached = self.engine.reserve(request)
        if cached is None:
            return False
        landing = CopySink.of(self.engine, request.request_id)
        self.prefill.add(request, sink=landing, first_block=cached // 4, prefill_only=True)
        (first,) = sampled(run(self.prefill)[request.request_id])
        self.got[request.request_id] = [first.token_id]
        self.parked[request.request_id] = first
        return True

    def join_one(self) -> None:
        if self.parked:
            name = next(iter(self.parked))
            if self.engine.join(name, self.parked.pop(name)):
                self.live.remove(name)

    def abort(self, victim: int) -> None:
        if self.live:
            name = self.live.pop(victim % len(self.live))
            self.parked.pop(name, None)
            del self.expected[name]
            assert self.engine.abort(name)

    def step(self) -> None:
        self.join_one()
        for output in self.engine.step():
            assert output.request_id in self.live
            assert output.first_index == len(self.got[output.request_id])
            self.got[output.request_id] += [token.token_id for token in output.tokens]
            if output.finished:
                self.live.remove(output.request_id)

    def drain(self) -> None:
        for _ in range(1000):
            if not self.live:
                return
            self.step()
            self.engine.check_integrity()
        raise AssertionError(f"{self.live} never ended: {self.engine.stats()}")


CASES = [("llama3", "none", 0), ("llama3", "none", 5), ("llama3", "draft", 5), ("gemma3", "draft", 0)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def engines(family: Families, request: pytest.FixtureRequest) -> tuple[Engine, Engine, Oracle]:
    """The engine under test has 9 blocks of 4: one long sequence, or two or three short ones. Those that it preempts
    may have 5 in the host's memory. Layers of gemma3 with a window have six.

    By a clock that stands still every proposal pays, and every swap for which there is room.
    """
    name, method, swap_blocks = request.param
    path = family(name)[1]
    draft = family("llama2")[1] if name == "llama3" else path
    speculation = {"speculative": Speculative(method, 3), "speculative_model": draft}
    tiny = make_engine(
        path, num_blocks=9, max_num_batched_tokens=7, max_num_seqs=4, likely_answer=4, now=lambda: 0.0,
        swap_memory=swap_blocks * BLOCK_BYTES, **speculation,
    )  # fmt: skip
    return tiny, make_engine(path, max_num_batched_tokens=5), Oracle(path)


@pytest.mark.long
@settings(max_examples=100, deadline=None, derandomize=True)
@given(jobs=st.lists(JOBS, min_size=3, max_size=14))
def test_every_block_comes_back_and_every_token_is_right(
    engines: tuple[Engine, Engine, Oracle], jobs: list[Deed]
) -> None:
    session = Session(*engines)
    try:
        for number, job in enumerate(jobs):
            session.do(number, job)
        session.drain()
        assert {name: session.got[name] for name in session.expected} == session.expected
        assert_idle(session.engine)
        assert_idle(session.prefill)
    finally:
        for name in session.live:
            session.engine.abort(name)
