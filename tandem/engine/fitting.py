"""The number of KV blocks a device has room for: its share less weights, the largest steps and graphs, all measured.

    before weights ─> DeviceRoom ─ load ─ largest_steps ─ two graphs ─> left ─> blocks ─ all graphs

torch's allocator keeps the memory that the trial steps used, so the measurement counts it as taken, and later steps
use it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
import torch

from tandem.checkpoints import MemoryNeed, described, held_weights, misfit
from tandem.engine.kv import KVLayout
from tandem.engine.scheduling import Scheduled, new_sequence
from tandem.engine.types import EngineConfig, Request
from tandem.machine.resources import usable_memory
from tandem.sampling import SamplingParams

log = structlog.get_logger(__name__)
GIB = 2**30
# (tokens of a step, sequences at once) for GPUs of at least LARGE bytes, for smaller GPUs, and for CPUs.
LARGE, ON_LARGE, ON_SMALL, ON_CPU = 70 * GIB, (8192, 1024), (2048, 256), (512, None)


class Memory(Protocol):
    """The part of torch.cuda that is used here."""

    def mem_get_info(self) -> tuple[int, int]: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...


def sized(config: EngineConfig, device: torch.device, cuda: Memory = torch.cuda) -> EngineConfig:
    """Returns the config with step sizes that suit the device wherever the config sets none."""
    if device.type == "cpu":
        most_tokens, most_seqs = ON_CPU
    else:
        most_tokens, most_seqs = ON_LARGE if cuda.mem_get_info()[1] >= LARGE else ON_SMALL
    return config.with_sizes(config.max_num_batched_tokens or most_tokens, config.max_num_seqs or most_seqs)


def check_memory(
    config: EngineConfig, weights: int, layout: KVLayout, num_blocks: int, cuda: Memory = torch.cuda
) -> None:
    """Raises ValueError if the machine, or the GPU, has less memory than this worker alone needs.

    Args:
        weights: bytes, before any quantization.
    """
    kv = layout.cache_bytes(num_blocks)
    needs = [MemoryNeed.of(held_weights(weights, "auto", config.quantization), kv, config.tensor_parallel)]
    available = usable_memory() if config.device == "cpu" else cuda.mem_get_info()[1]
    if why := misfit(needs, available):
        raise ValueError(f"model_path: {why}")
    log.info("memory", needs=described(needs, available))


class DeviceRoom:
    """Measures the device memory taken since its creation, before weights are loaded.

    Raises ValueError if less than `share` of the memory is free at its creation.
    """

    def __init__(self, share: float, cuda: Memory = torch.cuda) -> None:
        self._cuda = cuda
        self._free, total = cuda.mem_get_info()
        self.most = int(share * total)
        if self.most > self._free:
            raise ValueError(
                f"kv_memory: {share:g} of the device's {total / GIB:.1f} GiB are wanted, weights included, but "
                f"{self._free / GIB:.1f} GiB are free: name a smaller share, or the bytes for KV"
            )

    def left(self) -> int:
        """Returns the bytes of the share that have not been taken since this object was made."""
        self._cuda.synchronize()
        return self.most - (self._free - self._cuda.mem_get_info()[0])

    def taken_by(self, work: Callable[[], object]) -> int:
        """Runs `work` and returns the bytes that its result keeps allocated."""
        before = self._settled()
        kept = work()
        taken = before - self._settled()
        del kept
        return max(0, taken)

    def _settled(self) -> int:
        self._cuda.synchronize()
        self._cuda.empty_cache()
        return self._cuda.mem_get_info()[0]


def graphs_bytes(room: DeviceRoom, captures: Sequence[Callable[[], object]]) -> int:
    """Estimates the bytes that all `captures`, the largest first, will take, by running the first two.

    Every later capture reuses the pool memory of the first, so it costs about as much as the second.
    """
    kept = list[object]()
    each = [room.taken_by(lambda capture=capture: kept.append(capture())) for capture in captures[:2]]  # type: ignore[misc]
    return sum(each) + each[-1] * max(0, len(captures) - 2) if each else 0


def largest_steps(config: EngineConfig, layout: KVLayout, max_model_len: int) -> list[list[Scheduled]]:
    """Returns the two largest steps: one full of prompt tokens, one of as many decodes as may run; all use block 0."""
    tokens = config.max_num_batched_tokens
    lengths = [min(max_model_len - 1, tokens - start) for start in range(0, tokens, max_model_len - 1)]
    rows = min(config.max_num_seqs or tokens, tokens)
    return [
        [_scheduled(length, place, config, layout) for place, length in enumerate(step)]
        for step in (lengths, [1] * rows)
    ]


def _scheduled(length: int, place: int, config: EngineConfig, layout: KVLayout) -> Scheduled:
    sampling = SamplingParams(1, temperature=1.0, top_p=0.9, seed=0)
    seq = new_sequence(Request(str(place), [0] * length, sampling), place, layout)
    seq.block_table = [0] * -(-length // config.block_size)
    return Scheduled(seq, length, True)
