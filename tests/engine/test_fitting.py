"""KV gets what is left of a device's share, measured behind the largest steps and with graphs counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tandem.checkpoints import MemoryNeed, described
from tandem.engine import EngineConfig, SamplingParams
from tandem.engine.build import _blocks_that_fit, _layout
from tandem.engine.fitting import DeviceRoom, check_memory, graphs_bytes, largest_steps, sized
from tandem.engine.forward.forward import StepInput, TorchForward
from tandem.engine.loading import load
from tandem.engine.models import read_model_config
from tandem.machine.resources import usable_memory
from tests.engine.tiny import make_engine

GIB = 1 << 30


class CountedMemory:
    """A device's memory, as torch.cuda tells of it: `used` stays until it is lowered."""

    def __init__(self, total: int = 80 * GIB, used: int = 0) -> None:
        self.total, self.used, self.cached = total, used, 0

    def mem_get_info(self) -> tuple[int, int]:
        return self.total - self.used - self.cached, self.total

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        self.cached = 0


def test_the_share_is_of_the_whole_device_and_counts_what_was_taken_since() -> None:
    memory = CountedMemory(used=2 * GIB)
    room = DeviceRoom(0.9, memory)
    memory.used += 16 * GIB
    memory.cached += 3 * GIB
    assert room.left() == int(0.9 * 80 * GIB) - 19 * GIB


def test_a_share_that_is_not_free_is_refused_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"^kv_memory: 0\.9 of the device's 80\.0 GiB .* but 40\.0 GiB are free"):
        DeviceRoom(0.9, CountedMemory(used=40 * GIB))
    DeviceRoom(0.45, CountedMemory(used=40 * GIB))


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 900), (2, 910), (30, 900 + 29 * 10)])
def test_graphs_are_counted_by_the_largest_and_the_one_behind_it(count: int, expected: int) -> None:
    memory, done = CountedMemory(), list[int]()

    def capture(place: int) -> Callable[[], object]:
        def run() -> object:
            memory.used += 900 if place == 0 else 10
            memory.cached += 5000  # of the runs before, which stays with nobody
            done.append(place)
            return object()

        return run

    assert graphs_bytes(DeviceRoom(0.9, memory), [capture(place) for place in range(count)]) == expected
    assert done == list(range(min(2, count)))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bytes_for_kv_are_weighed_with_weights_before_they_are_loaded(llama: Path, quantization: str) -> None:
    config = EngineConfig(llama, "tiny", device="cuda", block_size=4, quantization=quantization)  # type: ignore[arg-type]
    layout = _layout(config, read_model_config(llama, None))
    num_blocks = 10 * GIB // (layout.block_bytes * layout.num_layers)
    weights = 20 * GIB if quantization == "none" else int(20 * GIB / 0.55)
    check_memory(config, weights, layout, num_blocks, CountedMemory(31 * GIB))
    with pytest.raises(
        ValueError, match=r"^model_path: does not fit: 1 worker \(weights 20\.0 \+ KV 10\.0 \+ overhead 0\.4"
    ):
        check_memory(config, weights, layout, num_blocks, CountedMemory(30 * GIB))


@pytest.mark.usefixtures("info_logs")
def test_a_worker_logs_what_it_needs_of_the_memory_there_is(llama: Path) -> None:
    with capture_logs() as logs:
        engine = make_engine(llama, num_blocks=64)
    kv = 64 * engine.layout.block_bytes * engine.layout.num_layers
    [line] = [line for line in logs if line["event"] == "memory"]
    assert f"KV {kv / GIB:.1f} + overhead 0.4 GiB) needs" in line["needs"]
    assert line["needs"].endswith(f" of {usable_memory() / GIB:.1f} GiB")


def test_steps_are_sized_by_the_device(demo_model: Path) -> None:
    plain = EngineConfig(demo_model, "demo", max_num_batched_tokens=0, device="cuda")
    told = EngineConfig(demo_model, "demo", max_num_batched_tokens=64, max_num_seqs=3, device="cuda")
    cuda = torch.device("cuda:0")
    found = [
        (config.max_num_batched_tokens, config.max_num_seqs)
        for config in (
            sized(plain, cuda, CountedMemory(80 * GIB)), sized(plain, cuda, CountedMemory(24 * GIB)),
            sized(told, cuda, CountedMemory()), sized(plain, torch.device("cpu"), CountedMemory()),
        )
    ]  # fmt: skip
    assert found == [(8192, 1024), (2048, 256), (64, 3), (512, None)]


class Peaks:
    """A forward of a device that keeps the memory of its largest step."""

    memory = CountedMemory()
    tokens: list[list[int]]

    def __call__(self, step: StepInput, written: Any = None) -> Tensor:
        self.tokens.append(list(step.counts))
        self.memory.cached = max(self.memory.cached, len(step.input_ids) * 1000)
        return self.plain(step, written)

    def __init__(self, *given: Any) -> None:
        self.plain = TorchForward(*given)
        self.logits = self.plain.logits


@pytest.mark.usefixtures("info_logs")
def test_blocks_are_what_weights_and_the_largest_steps_leave(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        llama, "tiny", dtype="float32", block_size=4, max_num_batched_tokens=100, max_num_seqs=7, memory_share=0.5
    )
    model = read_model_config(llama, None)
    layout = _layout(config, model)
    memory, Peaks.tokens = CountedMemory(4 << 20, used=1000), []
    Peaks.memory = memory
    monkeypatch.setattr("tandem.engine.build.TorchForward", Peaks)
    room = DeviceRoom(0.5, memory)
    loaded = load(config, llama, model, layout, None)
    memory.used += 500_000
    with capture_logs() as logs:
        blocks = _blocks_that_fit(config, room, loaded, layout)
    kv = (2 << 20) - 500_000 - 100_000
    assert logs[-1]["needs"] == described([MemoryNeed(500_000, kv, overhead=100_000)], 2 << 20)
    layers = layout.num_layers + loaded.attention.gathered_layers
    assert blocks == kv // (layout.block_bytes * layers)
    longest = model.max_model_len - 1
    assert sorted(Peaks.tokens[0]) == sorted([longest] * (100 // longest) + [100 % longest])
    assert Peaks.tokens[1] == [1] * 7


def test_the_largest_steps_draw_as_many_tokens_as_may_run(llama: Path) -> None:
    config = EngineConfig(llama, "tiny", max_num_batched_tokens=30, block_size=4)
    prompts, decodes = largest_steps(config, _layout(config, read_model_config(llama, None)), 12)
    assert [item.num_tokens for item in prompts] == [11, 11, 8]
    assert len(decodes) == 30, "no more sequences run than a step has tokens"
    assert decodes[0].seq.sampling == SamplingParams(1, temperature=1.0, top_p=0.9, seed=0)
