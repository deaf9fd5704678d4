"""A model's weights in memory, whole or a rank's shard, and the KV cache that its steps read and write."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from tandem.engine.forward import Forward, PagedAttention, Taps, TorchForward, paged_attention_for
from tandem.engine.kernels import CpuForward, load_library
from tandem.engine.kv import KVLayout, torch_dtype
from tandem.engine.loading.shard_forward import ShardForward
from tandem.engine.models import Decoder, ModelConfig
from tandem.engine.parallel import RankExchange, Shard, ShardedDecoder, SharedMemory, part_columns
from tandem.engine.types import EngineConfig, Progress
from tandem.engine.weights import load_weights

log = structlog.get_logger(__name__)
# The fewest multiplications worth a thread in a pass: about a third of a millisecond. With less work each, and another
# process competing for the cores, threads wait for each other longer than they compute.
LEAST_WORK = 2**23
LINE = 64  # bytes: each layer's cache begins at a multiple


class Loaded(NamedTuple):
    """A model's weights and its attention; `library` is the compiled kernels that compute the model, if any."""

    model: Decoder
    library: ctypes.CDLL | None
    attention: PagedAttention


class LoadedShard(NamedTuple):
    """A rank's shard of a model."""

    model: ShardedDecoder
    library: ctypes.CDLL | None
    max_tokens: int

    def forward(self, kv_cache: list[Tensor], threads: int, taps: Taps | None = None) -> Forward:
        """Returns the forward pass of this rank, over its heads of the whole `kv_cache`."""
        model, heads = self.model, self.model.kv_heads
        own = [kv[:, :, heads.start : heads.stop] for kv in kv_cache]
        if self.library is not None:
            return ShardForward(self.library, model, own, self.max_tokens, threads, taps, LEAST_WORK)
        scopes = [layer.attention.scope for layer in model.layers]
        attention = paged_attention_for(own[0], len(model.heads), scopes)
        return TorchForward(model, own, attention, taps, part_columns(model))


def load(
    config: EngineConfig, path: Path, model_config: ModelConfig, layout: KVLayout, on_progress: Progress | None
) -> Loaded:
    """Loads the model at `path`: the engine's own, or one that drafts for it."""
    model = Decoder(model_config, torch_dtype(layout.dtype), config.device)
    makes_codes = config.quantization != "none" and path == config.model_path
    library = _kernels(config, layout, lambda: CpuForward.misfit(model_config))
    load_weights(model, path, on_progress, keep_codes=library is not None and not makes_codes)
    if makes_codes:
        model.quantize(config.quantization)
    scopes = [layer.attention.scope for layer in model.layers]
    like = torch.zeros(layout.block_shape(1), dtype=layout.kv_dtype, device=config.device)
    return Loaded(model, library, paged_attention_for(like, model_config.num_heads, scopes))


def load_shard(
    config: EngineConfig, model_config: ModelConfig, layout: KVLayout, shard: Shard, exchange: RankExchange,
    library: ctypes.CDLL | None, on_progress: Progress | None = None,
) -> LoadedShard:  # fmt: skip
    """Loads a rank's shard of the engine's model. `library`: the compiled kernels to compute it with, if any."""
    makes_codes = config.quantization != "none"
    model = ShardedDecoder(model_config, torch_dtype(layout.dtype), shard, exchange)
    keep_codes = library is not None and not makes_codes
    load_weights(model, config.model_path, on_progress, keep_codes, model.rows)
    if makes_codes:
        model.quantize(config.quantization)
    return LoadedShard(model, library, config.max_num_batched_tokens)


def new_kv_cache(layout: KVLayout, device: str, num_blocks: int) -> list[Tensor]:
    """Allocates each layer's blocks, zeroed: a masked slot is still multiplied by 0, so it must hold a finite number.

    Each layer's memory has one block more after its last, which belongs to no sequence: see `padded`.
    """
    return [torch.zeros(shape, dtype=layout.kv_dtype, device=device)[:-1] for shape in _shapes(layout, num_blocks)]


def shared_kv_cache(layout: KVLayout, num_blocks: int, memory: SharedMemory) -> list[Tensor]:
    """Returns the same cache in memory that ranks share, of at least `shared_kv_bytes`."""
    found, end = list[Tensor](), 0
    for shape in _shapes(layout, num_blocks):
        cache = memory.tensor(end, shape, layout.kv_dtype)
        found.append(cache[:-1])
        end += _in_lines(cache.nbytes)
    return found


def shared_kv_bytes(layout: KVLayout, num_blocks: int) -> int:
    return sum(_in_lines(shape[0] * layout.block_bytes) for shape in _shapes(layout, num_blocks))


def _in_lines(size: int) -> int:
    return -(-size // LINE) * LINE


def _shapes(layout: KVLayout, num_blocks: int) -> list[tuple[int, int, int, int, int]]:
    return [layout.block_shape(layout.layer_blocks(layer, num_blocks) + 1) for layer in range(layout.num_layers)]


def shard_kernels(config: EngineConfig, model: ModelConfig, layout: KVLayout) -> ctypes.CDLL | None:
    """Returns the compiled CPU kernels if they can compute the model among ranks on this machine, else None."""
    return _kernels(config, layout, lambda: ShardForward.misfit_among(model, config.tensor_parallel))


def _kernels(config: EngineConfig, layout: KVLayout, misfit_of: Callable[[], str]) -> ctypes.CDLL | None:
    if not config.cpu_kernels or config.device != "cpu" or layout.dtype != "bfloat16":
        return None
    if misfit := misfit_of():
        log.warning("CPU kernels are off, torch computes everything", reason=misfit)
        return None
    return load_library()
