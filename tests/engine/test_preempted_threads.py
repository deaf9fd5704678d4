"""Threads that lose their cores in the middle of a piece hold nobody up, and change no bit when they come back."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels import CpuForward, load_library
from tandem.engine.kv.kv_cache import row_size
from tandem.engine.lora import Adapter, LowRank, shapes_of
from tandem.engine.models import Decoder, ModelConfig
from tests.engine.test_kernel_families import config_of
from tests.engine.test_kernels import SHAPES, fill, quantize_model, steps

pytestmark = pytest.mark.long
SIZES = SHAPES[1]
TABLES = [list(range(32 * i, 32 * i + 32)) for i in range(4)]


@pytest.fixture(scope="module")
def stalling(library: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same kernels; their threads sleep for up to 0.8 ms, before one piece of eight and before it is won."""
    folder, amx = tmp_path_factory.mktemp("stalling"), bool(library.tandem_has_amx())
    stalling = load_library(folder, amx, flags=["-DSTALLS=8"])
    assert stalling is not None
    return stalling


@pytest.mark.parametrize("kind", ["none", "int4", "ordered", "int8 KV", "adapters", "experts"])
def test_their_pieces_are_computed_again_and_no_bit_changes(
    library: ctypes.CDLL, stalling: ctypes.CDLL, kind: str, tmp_path: Path
) -> None:
    config = config_of("qwen2-moe", tmp_path) if kind == "experts" else SIZES.config(tmp_path)
    alone, two, five = (
        computed(kernels, threads, kind, config) for kernels, threads in ((library, 1), (stalling, 2), (stalling, 5))
    )
    for found in (two, five):
        assert all(map(torch.equal, found, alone))


def computed(library: ctypes.CDLL, threads: int, kind: str, config: ModelConfig) -> list[Tensor]:
    """Hidden states and logits of several steps, and the cache behind them."""
    model = Decoder(config, torch.bfloat16)
    fill(model, 3)
    if kind in ("int4", "ordered", "experts"):
        quantize_model(model, "ordered" if kind == "experts" else kind)
    dtype = torch.int8 if kind == "int8 KV" else torch.bfloat16
    cache = [torch.zeros(128, 2, 2, 16, row_size(dtype, config.head_dim), dtype=dtype) for _ in model.layers]
    forward, adapter, found = (
        CpuForward(library, model, cache, 512, lambda: threads),
        adapter_of(config),
        list[Tensor](),
    )
    for step in steps(SIZES, TABLES):
        adapters = [adapter if kind == "adapters" and n % 2 else None for n in range(len(step.counts))]
        with torch.inference_mode():
            hidden = forward(replace(step, adapters=adapters)).clone()
            found += [hidden, forward.logits(hidden, range(len(hidden))).clone()]
    return found + cache


def adapter_of(config: ModelConfig) -> Adapter:
    """An adapter of rank 8 in every linear layer."""
    chance = torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> Tensor:
        return (0.1 * torch.randn(shape, generator=chance)).bfloat16()

    def layer() -> dict[str, LowRank]:
        return {name: LowRank(matrix(8, inputs), matrix(8, outputs)) for name, (outputs, inputs) in shapes.items()}

    shapes = shapes_of(config)
    return Adapter("revision", [layer() for _ in range(config.num_layers)])
