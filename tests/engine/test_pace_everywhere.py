"""However long steps take: a target between tokens is kept, or it holds nobody back. A scheduler on virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine import Request, StepTime
from tandem.engine.kv.layout import KVLayout
from tandem.engine.kv.swap import SwapSpace
from tandem.engine.scheduling.block_pool import BlockPool
from tandem.engine.scheduling.pace import LEAST_CHUNK, PAUSE_S, Pace
from tandem.engine.scheduling.scheduler import Scheduled, Scheduler
from tandem.engine.scheduling.sequence import new_sequence
from tandem.engine.scheduling.sequence_blocks import SequenceBlocks
from tests.engine.tiny import greedy

BLOCK, USUAL = 16, 512
LAYOUT = KVLayout("m", "1", "float32", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK)


@dataclass
class SteadyStream:
    at: float
    prompt: int
    answer: int
    work: int = 0  # prompt tokens computed while it waited for its first one
    first_at: float = inf
    last_at: float = inf


class Simulated:
    """Steps that take the time they are said to; no KV, no tokens that mean anything."""

    def __init__(self, time: StepTime, target_s: float, most: int = USUAL, usual: int | None = USUAL) -> None:
        self._time, self._target_s = time, target_s
        self.now, self.num_prefilled, self.gaps = 0.0, 0, list[float]()
        self._pace = Pace(most, usual)
        swap = SwapSpace([torch.empty(1)], 0, lambda: self.now)
        self._scheduler = Scheduler(
            SequenceBlocks(BlockPool(2**14), swap, block_size=BLOCK, prefix_caching=False), pace=self._pace,
            max_num_batched_tokens=most, max_num_seqs=USUAL,
        )  # fmt: skip
        self._streams: dict[str, SteadyStream] = {}

    def run(self, streams: list[SteadyStream]) -> float:
        """Returns when the last one ended."""
        coming = sorted(streams, key=lambda stream: -stream.at)
        while coming or self._scheduler.waiting or self._scheduler.running:
            if not (self._scheduler.waiting or self._scheduler.running):
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                self._add(coming.pop())
            self._step()
        return self.now

    def _add(self, stream: SteadyStream) -> None:
        name = str(len(self._streams))
        self._streams[name] = stream
        stream.work, stream.at = -self.num_prefilled, self.now  # the step under way is not its own
        request = Request(name, [1] * stream.prompt, greedy(stream.answer), itl_target_s=self._target_s)
        seq = new_sequence(request, len(self._streams), LAYOUT)
        seq.itl_target_s = self._target_s
        self._scheduler.add(seq)

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        counts = [item.num_tokens for item in batch]
        num_written = counts.count(1)
        taken = self._time.seconds(counts)
        self.now += taken
        self.num_prefilled += sum(counts) - num_written
        self._pace.passed(sum(counts) - num_written, num_written, taken)
        if any(not item.seq.is_prefilling for item in batch):
            self.gaps.append(taken)
        for item in batch:
            self._advance(item)

    def _advance(self, item: Scheduled) -> None:
        seq, stream = item.seq, self._streams[item.seq.request_id]
        seq.num_computed_tokens += item.num_tokens
        if not item.samples:
            return
        seq.token_ids.append(1)
        if stream.first_at == inf:
            stream.first_at = self.now
            stream.work += self.num_prefilled
        if seq.num_output_tokens == stream.answer:
            stream.last_at = self.now
            self._scheduler.remove(seq)


@dataclass(frozen=True)
class DeviceTime(StepTime):
    """All that is in a step shares the reading of weights; fewer tokens than are computed meanwhile cost nothing."""

    def seconds(self, num_tokens: Iterable[int]) -> float:
        counts = list(num_tokens)
        reading = max(self.decode_step_s, sum(counts) / self.prefill_tokens_per_s)
        return reading + counts.count(1) * self.decode_sequence_s


TIMES = st.builds(
    lambda token, step, growth: StepTime(10**-token, 10**step, growth * 10**step),
    st.floats(-6, -2), st.floats(-4, 0.3), st.sampled_from([0.0, 0.001, 0.01, 0.1]),
)  # fmt: skip
# Weights are read while 100 to 1000 tokens are computed.
DEVICES = st.builds(
    lambda step, meanwhile: DeviceTime(meanwhile / step, step, 0.01 * step),
    st.floats(0.002, 0.05),
    st.integers(100, 1000),
)
LARGEST = 8192  # step of a device
# When they come, in steps; prompt and answer.
STREAMS = st.lists(
    st.tuples(st.floats(0, 100), st.sampled_from([2, 20, 60, 400]), st.integers(1, 40)), min_size=2, max_size=50
)
Asked: TypeAlias = list[tuple[float, int, int]]


def run(time: StepTime, target_s: float, asked: Asked) -> tuple[Simulated, list[SteadyStream], float]:
    """Also how long all took, once it is known how long steps take."""
    simulated = Simulated(time, target_s)
    begun = simulated.run([SteadyStream(0.0, 60, 20)])
    simulated.gaps.clear()
    streams = [SteadyStream(begun + at * time.decode_step_s, prompt, answer) for at, prompt, answer in asked]
    return simulated, streams, simulated.run(streams) - begun


def device_with(time: DeviceTime, target_s: float, short: list[int]) -> Simulated:
    """One that has answered a prompt beside another, and since then short ones alone."""
    simulated = Simulated(time, target_s, LARGEST, None)
    simulated.run([SteadyStream(0.0, 60, 20), SteadyStream(0.0, 4000, 3)])
    simulated.run(
        [SteadyStream(simulated.now + 30 * n * time.decode_step_s, length, 2) for n, length in enumerate(short)]
    )
    simulated.gaps.clear()
    return simulated


def beside(simulated: Simulated, time: DeviceTime, prompt: int) -> list[float]:
    """Gaps of an answer while such a prompt is prefilled."""
    begun = simulated.now
    simulated.run([SteadyStream(begun, 20, 400), SteadyStream(begun + 3 * time.decode_step_s, prompt, 1)])
    return [gap for gap in simulated.gaps if gap > 1.1 * time.decode_step_s]


def longest_step_s(time: StepTime, asked: Asked) -> float:
    """With all of them decoding."""
    return time.decode_step_s + len(asked) * time.decode_sequence_s


@settings(max_examples=100, deadline=None, derandomize=True)
@given(time=TIMES, part=st.floats(0.01, 1), asked=STREAMS)
def test_a_target_out_of_reach_costs_next_to_nothing(time: StepTime, part: float, asked: Asked) -> None:
    took_s = run(time, part * time.decode_step_s, asked)[2]
    assert took_s <= 1.1 * run(time, 0.0, asked)[2]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(time=TIMES, times=st.floats(0.01, 30), asked=STREAMS)
def test_a_first_token_waits_for_the_prompts_before_it(time: StepTime, times: float, asked: Asked) -> None:
    """Beside decodes: as long again where those miss their target anyway, and ten times as long where a target leaves
    no more than a tenth."""
    _, streams, _ = run(time, times * time.decode_step_s, asked)
    for stream in streams:
        decodes_s = (stream.work / USUAL + 2) * longest_step_s(time, asked)
        work_s = stream.work / time.prefill_tokens_per_s
        assert stream.first_at - stream.at <= (2.5 if times <= 1 else 10) * (work_s + decodes_s)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(time=TIMES, times=st.floats(1.25, 30), asked=STREAMS)
def test_a_target_in_reach_is_kept(time: StepTime, times: float, asked: Asked) -> None:
    target_s = times * longest_step_s(time, asked)
    simulated, *_ = run(time, target_s, asked)
    least_s = longest_step_s(time, asked) + (LEAST_CHUNK + 1) / time.prefill_tokens_per_s
    kept_s = max(target_s, least_s)
    late = [gap for gap in simulated.gaps if gap > kept_s]
    assert len(late) <= 0.02 * len(simulated.gaps) + 3
    assert max(late, default=0.0) <= 1.2 * kept_s, "while it is not known yet how long more decodes take"


SHORT = st.builds(lambda length, count: [length] * count, st.integers(16, 90), st.integers(0, 60))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(time=DEVICES, times=st.floats(3, 20), short=SHORT)
def test_on_a_device_chunks_use_what_a_target_leaves(time: DeviceTime, times: float, short: list[int]) -> None:
    """However many prompts it prefilled before that were too short to tell how fast it does."""
    target_s = times * time.decode_step_s
    gaps = beside(device_with(time, target_s, short), time, 30_000)
    assert max(gaps) <= 1.2 * target_s
    fits = min(0.9 * target_s * time.prefill_tokens_per_s, LARGEST)
    assert len(gaps) <= 1.2 * 30_000 / fits + 4


@settings(max_examples=25, deadline=None, derandomize=True)
@given(time=DEVICES, short=SHORT)
def test_on_a_device_answers_without_target_pause_for_a_tenth_of_a_second(time: DeviceTime, short: list[int]) -> None:
    gaps = beside(device_with(time, 0.0, short), time, 30_000)
    fits = min(PAUSE_S * time.prefill_tokens_per_s, LARGEST)
    assert max(gaps) <= 1.2 * PAUSE_S + time.decode_step_s
    assert len(gaps) <= 1.2 * 30_000 / fits + 4
