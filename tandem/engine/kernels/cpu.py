"""The C kernels as a `Forward`: a decoder's whole pass in bfloat16 on the CPU.

load ── pack: each weight changes its layout in place, so it is held once ──> layers ── logits
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from tandem.engine.forward import StepInput
from tandem.engine.kernels.packed import PackedWeight, WeightStruct
from tandem.engine.models import Decoder, DecoderLayer, ModelConfig

_MAX_THREADS, _PANEL_OUTPUTS, _TILE_ROWS, _TILE_PAIRS = 128, 32, 32, 16
_MAX_HEAD_DIM = 256  # the room that the kernels have for a block of keys
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    """`struct layer` of model.h."""

    _fields_ = [
        *((name, WeightStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "qkv_bias", "q_norm", "k_norm", "o_bias", "post_norm")),
        *((name, _POINTER) for name in ("gate_up_bias", "down_bias", "kv")),
    ]


class _Model(ctypes.Structure):
    """`struct model` of model.h."""

    _fields_ = [
        ("layers", _POINTER),
        ("head", WeightStruct),
        ("norm", _POINTER),
        ("opened", _POINTER),
        ("opened_size", _INT),
        ("inverse", _POINTER),
        *((name, _INT) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "block_size")),
        ("eps", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    """`struct step` of model.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "normed", "qkv", "attended", "inner", "cos", "sin")),
        *((name, _POINTER) for name in ("positions", "slots", "starts", "lengths", "table_starts", "tables")),
        *((name, _INT) for name in ("rows", "seqs")),
    ]


class CpuForward:
    """Runs `model`, whose weights it packs, over `kv_cache` in steps of at most `max_tokens` tokens.

    `num_threads` is asked before each pass.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: Decoder,
        kv_cache: list[Tensor],
        max_tokens: int,
        num_threads: Callable[[], int] = torch.get_num_threads,
    ) -> None:
        self._library, self._model, self._num_threads = library, model, num_threads
        self._kv_cache = tuple(kv_cache)  # the structs below only point at it
        self._embed = PackedWeight(library, model.embed)
        self._head = self._embed if model.lm_head is model.embed else PackedWeight(library, model.lm_head)
        model.embed = model.lm_head = model.embed.new_empty(0)
        self._weights = [_pack(library, layer) for layer in model.layers]
        self._layers = (_Layer * len(model.layers))(*map(_layer, model.layers, self._weights, kv_cache))
        config = model.config
        widest = max(config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
        self._opened = torch.empty(
            _MAX_THREADS, (widest // 2 + _TILE_PAIRS) * _PANEL_OUTPUTS, dtype=torch.int32
        )  # untouched till used
        self._struct = _struct(model, self._layers, self._head, kv_cache[0], self._opened)
        heads = config.num_heads * config.head_dim
        widths = (config.hidden_size, config.hidden_size, heads + 2 * config.num_kv_heads * config.head_dim, heads)
        self._angles = torch.empty(2, max_tokens, config.head_dim // 2)
        self._logits = torch.empty(0)
        rows = max_tokens + _TILE_ROWS - 1  # a tile reads as many, and lets go of what comes of the last
        self._room = [model.embed.new_empty(rows, width) for width in (*widths, config.intermediate_size)]
        self._room_at = [room.data_ptr() for room in (*self._room, *self._angles)]

    @staticmethod
    def fits(config: ModelConfig) -> bool:
        """Whether the model's sizes are multiples of what the kernels work in."""
        heads = config.num_heads + 2 * config.num_kv_heads
        outputs = (heads * config.head_dim, config.hidden_size, 2 * config.intermediate_size, config.vocab_size)
        if config.intermediate_size < 2 * _TILE_PAIRS:
            return False
        return math.gcd(*outputs, config.head_dim) % 32 == 0 and config.head_dim <= _MAX_HEAD_DIM

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        ids = step.input_ids
        self._library.tandem_unpack_rows(ctypes.byref(self._embed.struct), ids.data_ptr(), len(ids), self._room_at[0])
        starts, table_starts, tables = _joined(step)
        passed = _Step(
            *self._room_at, step.positions.data_ptr(), step.slots.data_ptr(),
            *map(_address, (starts, step.lengths, table_starts, tables)), len(ids), len(step.lengths),
        )  # fmt: skip
        self._run_halves(passed, written)
        return self._room[0][: len(ids)]

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        vocab_size = self._model.config.vocab_size
        if len(self._logits) < len(rows):
            self._logits = torch.empty(len(rows), vocab_size)
        out = self._logits[: len(rows)]
        picked = array("q", rows)
        passed = _Step(x=hidden.data_ptr(), normed=self._room_at[1])
        self._library.tandem_logits(
            ctypes.byref(self._struct), ctypes.byref(passed), _address(picked), len(rows), out.data_ptr(),
            self._num_threads(),
        )  # fmt: skip
        return out

    def _run_halves(self, passed: _Step, written: Callable[[int], None] | None) -> None:
        """All layers at once, or with a stop where a layer's KV lies in the cache: when its first half is computed."""
        first, end = 0, 2 * len(self._layers)
        if written is not None:
            for layer in range(len(self._layers)):
                self._run(passed, first, 2 * layer + 1)
                written(layer)
                first = 2 * layer + 1
        self._run(passed, first, end)

    def _run(self, passed: _Step, first: int, end: int) -> None:
        self._library.tandem_layers(ctypes.byref(self._struct), ctypes.byref(passed), first, end, self._num_threads())


def _pack(library: ctypes.CDLL, layer: DecoderLayer) -> list[PackedWeight]:
    """The layer's weights, one after the other, each let go of when it is packed."""
    packed = []
    for linear in layer.linears():
        packed.append(PackedWeight(library, linear.weight, halves=linear is layer.mlp.gate_up))
        linear.weight = linear.weight.new_empty(0)
    return packed


def _layer(layer: DecoderLayer, weights: list[PackedWeight], kv: Tensor) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    q_norm, k_norm = attention.norms or (None, None)
    vectors = (
        layer.input_norm, attention.qkv.bias, q_norm, k_norm, attention.o.bias, layer.post_norm, mlp.gate_up.bias,
        mlp.down.bias, kv,
    )  # fmt: skip
    return _Layer(*(weight.struct for weight in weights), *map(_pointer, vectors))


def _struct(model: Decoder, layers: ctypes.Array[_Layer], head: PackedWeight, kv: Tensor, opened: Tensor) -> _Model:
    config = model.config
    return _Model(
        ctypes.addressof(layers), head.struct, model.norm.data_ptr(), opened.data_ptr(), opened.shape[1],
        model.inverse.data_ptr(), config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
        config.intermediate_size, kv.shape[3], config.rms_norm_eps,
    )  # fmt: skip


def _joined(step: StepInput) -> tuple[array[int], array[int], array[int]]:
    """Where each sequence's rows begin and end, where its blocks do, and the blocks of all."""
    starts = array("q", accumulate(step.counts, initial=0))
    table_starts = array("q", accumulate(map(len, step.tables), initial=0))
    return starts, table_starts, array("i", chain.from_iterable(step.tables))


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
