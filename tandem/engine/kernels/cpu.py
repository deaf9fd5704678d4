"""The C kernels as a `Forward`: a decoder's whole pass in bfloat16 on the CPU.

load ── pack: the packed copy of a weight replaces it, so each weight is held once ──> layers ── logits
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tandem.engine.forward import StepInput, Taps
from tandem.engine.kernels.layers import CLAMPED, PANEL_OUTPUTS, TILE_ROWS, MixtureRoom, PackedLayer, inner_size
from tandem.engine.kernels.packed import PackedWeight
from tandem.engine.kernels.structs import Layer, LoraPart, ModelStruct, Step, Weight
from tandem.engine.lora import PARTS, Adapter, LowRank, shapes_of
from tandem.engine.models import Decoder, ModelConfig

_MAX_THREADS, _TILE_PAIRS = 128, 16
_ACTIVATIONS = {"": 2, "gelu_tanh": 3, CLAMPED: 4}  # `enum kind` of linear.h
_MAX_HEAD_DIM = 256  # MAX_DIM of context.h
# The fields of ModelConfig that the kernels support. If any other field is set, the model needs an unknown operation.
_KNOWN = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "rms_norm_eps", "rope", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings",
        "max_model_len", "eos_token_ids", "dtype", "quantized", "norm_names", "fused_qkv", "fused_gate_up",
        "windows", "experts", "norms_from_one", "activation", "embed_scale", "attention_scale", "attention_softcap",
        "logits_softcap", "local_rope", "local_layers", "attention_sinks",
        "residual_scale", "logits_divisor", "qk_norm_of_all", "layers_without_rope", "rope_interleaved", "rotary_dim",
    }
)  # fmt: skip


class CpuForward:
    """Runs `model`, whose weights it packs, over `kv_cache` in steps of at most `max_tokens` tokens.

    `num_threads` is called before each pass; the pass and its logits use that many threads at most, and no more than
    get `least_work` multiplications each.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: Decoder,
        kv_cache: list[Tensor],
        max_tokens: int,
        num_threads: Callable[[], int] = torch.get_num_threads,
        taps: Taps | None = None,
        least_work: int = 1,
    ) -> None:
        self._library, self._model, self._num_threads, self._taps = library, model, num_threads, taps or Taps()
        self._threads, self._least_work = num_threads(), least_work
        self._kv_cache = tuple(kv_cache)  # keeps the cache alive: the structs below only point to it
        self._embed = PackedWeight(library, model.embed)
        self._head = self._embed if model.lm_head is model.embed else PackedWeight(library, model.lm_head)
        model.embed = model.lm_head = model.norm.new_empty(0)
        self._packed = [PackedLayer(library, model.config, *each) for each in zip(model.layers, kv_cache, strict=True)]
        self._layers = (Layer * len(self._packed))(*(layer.struct for layer in self._packed))
        config = self._config = self._own_config()
        of_experts = [weight for layer in self._packed for weight in layer.of_experts]
        per_token = config.experts.per_token if config.experts else 0
        self._mixture = MixtureRoom(config, max_tokens, model.norm) if per_token else None
        weights = [weight for layer in self._packed for weight in layer.weights] + [self._head.struct]
        widest = max(weight.inputs for weight in (*weights, *of_experts))
        # Its pages take memory only once used.
        self._opened = torch.empty(_MAX_THREADS, (widest // 2 + _TILE_PAIRS) * PANEL_OUTPUTS, dtype=torch.int32)
        self._x_sums = torch.empty(max_tokens, max(_groups(weights), _groups(of_experts) * per_token))
        self._inverse = torch.stack((model.inverse, model.local_inverse))
        self._struct = _struct(
            config, kv_cache[0], layers=ctypes.addressof(self._layers), head=self._head.struct,
            norm=model.norm.data_ptr(), opened=self._opened.data_ptr(), opened_size=self._opened.shape[1],
            x_sums=self._x_sums.data_ptr(), mixture=self._mixture and ctypes.addressof(self._mixture.struct),
            inverse=self._inverse.data_ptr(),
        )  # fmt: skip
        self._angles = torch.empty(2, 2 * max_tokens, self._inverse.shape[1])
        self._logits = self._added = torch.empty(0)  # allocated when a step first has so many rows, or adapters
        self._room = self._make_room(config, max_tokens)
        self._tables: WeakKeyDictionary[Adapter, tuple[ctypes.Array[LoraPart], object]] = WeakKeyDictionary()
        self._room_at = [room.data_ptr() for room in (*self._room, *self._angles)]

    @staticmethod
    def misfit(config: ModelConfig) -> str:
        """Returns why the kernels cannot compute such a model; empty if they can."""
        unknown = [f.name for f in fields(config) if f.name not in _KNOWN and getattr(config, f.name)]
        if unknown:
            return f"they do not know {', '.join(unknown)}"
        if config.experts and config.norm_names[3]:
            return "they do not know norms after experts"
        if (experts := config.experts) and (experts.groups > 1 or experts.has_correction or experts.has_wide_router):
            return "they do not know how experts are chosen"
        heads, inner = config.num_heads + 2 * config.num_kv_heads, _inner_sizes(config)
        outputs = (heads * config.head_dim, config.hidden_size, config.vocab_size, *(2 * size for size in inner))
        if min(inner) < 2 * _TILE_PAIRS or math.gcd(*outputs, config.head_dim, config.rotary_dim) % PANEL_OUTPUTS:
            return f"the model's sizes are no multiples of {PANEL_OUTPUTS}"
        return "" if config.head_dim <= _MAX_HEAD_DIM else f"head_dim {config.head_dim} is above {_MAX_HEAD_DIM}"

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        ids = step.input_ids
        if len(ids) > len(self._x_sums):
            raise ValueError(f"a step of {len(ids)} tokens, where there is room for {len(self._x_sums)}")
        self._put_embedded(ids)
        starts, table_starts, tables = _joined(step)
        near = step.near
        near_slots, near_tables = (step.slots, tables) if near is None else (near.slots, _tables(near.tables))
        rows = self._adapted_rows(step) if any(step.adapters) else None
        passed = Step(
            *self._room_at, step.positions.data_ptr(), step.slots.data_ptr(),
            *map(_address, (starts, step.lengths, table_starts, tables)), near_slots.data_ptr(), _address(near_tables),
            *((_address(rows), self._added_room(len(ids))) if rows else (None, None)),
            len(ids), len(step.lengths),
        )  # fmt: skip
        self._run_halves(passed, written)
        return self._room[0][: len(ids)]

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        vocab_size = self._model.config.vocab_size
        if len(self._logits) < len(rows):
            self._logits = torch.empty(len(rows), vocab_size)
        out = self._logits[: len(rows)]
        self._put_logits(hidden, rows, out)
        return self._model.bounded(out)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def _own_config(self) -> ModelConfig:
        """Returns the config with the numbers of heads, inner outputs and tokens that the model has here."""
        return self._model.config

    def _adapted_columns(self) -> Mapping[str, slice]:
        """Returns the outputs of each linear layer that adapters add to here."""
        return {name: slice(0, outputs) for name, (outputs, _) in shapes_of(self._config).items()}

    def _make_room(self, config: ModelConfig, max_tokens: int) -> list[Tensor]:
        """Returns what `struct step` has from `x` to `ordered`."""
        room = private_room(config, max_tokens, self._model.norm)
        return [*room, room[1], torch.empty(0)]

    def _put_embedded(self, ids: Tensor) -> None:
        self._unpack(ids, self._room[0])
        if self._model.embed_scale:
            self._room[0][: len(ids)].mul_(self._model.embed_scale)

    def _unpack(self, ids: Tensor, to: Tensor) -> None:
        self._library.tandem_unpack_rows(ctypes.byref(self._embed.struct), ids.data_ptr(), len(ids), to.data_ptr())

    def _put_logits(self, hidden: Tensor, rows: Sequence[int], out: Tensor) -> None:
        picked = array("q", rows)
        passed = Step(x=hidden.data_ptr(), normed=self._room_at[1])
        status = self._library.tandem_logits(
            ctypes.byref(self._struct), ctypes.byref(passed), _address(picked), len(rows), out.data_ptr(),
            self._threads,
        )  # fmt: skip
        if status:
            raise MemoryError("no memory for the logits of a step")

    def _adapted_rows(self, step: StepInput) -> array[int]:
        """Returns for each row the address of its adapter's table, or 0."""
        found = array("Q")
        for adapter, count in zip(step.adapters, step.counts, strict=True):
            found += array("Q", [ctypes.addressof(self._table(adapter)) if adapter else 0]) * count
        return found

    def _table(self, adapter: Adapter) -> ctypes.Array[LoraPart]:
        if adapter not in self._tables:
            of_each = self._adapted_columns()
            names = [(name, of_each[name]) for parts in PARTS.values() for name in parts]
            cut = [_cut(layer.get(name), columns) for layer in adapter.layers for name, columns in names]
            outputs = [columns.stop - columns.start for _ in adapter.layers for _, columns in names]
            found = map(_lora_part, cut, outputs)
            self._tables[adapter] = (LoraPart * len(cut))(*found), cut
        return self._tables[adapter][0]

    def _added_room(self, rows: int) -> int:
        if len(self._added) < rows:
            widest = max(weight.outputs for weight in self._packed[0].weights)
            self._added = torch.empty(rows, widest)
        return self._added.data_ptr()

    def _run_halves(self, passed: Step, written: Callable[[int], None] | None) -> None:
        """Runs all layers at once, or stops after the first half of each tapped or pushed layer: then the layer's KV is
        in the cache, and the layer's input still lies in the working memory."""
        first, end = 0, 2 * len(self._layers)
        self._taps.rows.clear()
        for layer in self._taps.at if written is None else range(len(self._layers)):
            self._run(passed, first, 2 * layer + 1)
            first = 2 * layer + 1
            self._taps.enter(layer, self._room[0][: passed.rows].clone())
            if written is not None:
                written(layer)
        self._run(passed, first, end)

    def _run(self, passed: Step, first: int, end: int) -> None:
        most = 1 + passed.rows * self._config.multiplications // self._least_work
        self._threads = min(most, self._num_threads()) if most > 1 else 1
        status = self._library.tandem_layers(
            ctypes.byref(self._struct), ctypes.byref(passed), first, end, self._threads
        )
        if status < 0:
            raise MemoryError("no memory for the attention of a step")
        if status:
            self._fail()

    def _fail(self) -> None:
        """Raises why the ranks of a pass have waited in vain; of one rank that is no case."""


def private_room(config: ModelConfig, max_tokens: int, like: Tensor) -> list[Tensor]:
    """Returns what `struct step` has from `x` to `inner`, of a process alone."""
    heads, hidden = config.num_heads * config.head_dim, config.hidden_size
    rows = max_tokens + TILE_ROWS - 1  # the last tile reads past the rows and drops their results
    widths = (hidden, hidden, heads + 2 * config.num_kv_heads * config.head_dim, heads)
    return [*(like.new_empty(rows, width) for width in widths), like.new_empty(inner_size(config, max_tokens))]


def _struct(config: ModelConfig, kv: Tensor, **pointers: Any) -> ModelStruct:
    ropes = (config.rope, config.local_rope or config.rope)
    return ModelStruct(
        hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        intermediate=config.intermediate_size, block_size=kv.shape[3], kv_int8=kv.dtype == torch.int8,
        block_stride=kv.stride(0) * kv.itemsize, value_stride=kv.stride(1) * kv.itemsize,
        angles=2 if config.local_rope else 1, rotated=config.rotary_dim or config.head_dim,
        interleaved=config.rope_interleaved, norms_all=config.qk_norm_of_all,
        factors=(ctypes.c_float * 2)(*(rope.attention_factor for rope in ropes)),
        activation=_ACTIVATIONS[config.activation], eps=config.rms_norm_eps, weights_from=config.norms_from_one,
        residual_scale=config.residual_scale or 1,
        attention_scale=config.attention_scale or config.head_dim**-0.5, attention_softcap=config.attention_softcap,
        **pointers,
    )  # fmt: skip


def _joined(step: StepInput) -> tuple[array[int], array[int], array[int]]:
    """Returns the bounds of each sequence's rows, the bounds of its blocks, and all sequences' blocks in one array."""
    starts = array("q", accumulate(step.counts, initial=0))
    table_starts = array("q", accumulate(map(len, step.tables), initial=0))
    return starts, table_starts, _tables(step.tables)


def _tables(tables: Sequence[Sequence[int]]) -> array[int]:
    return array("i", chain.from_iterable(tables))


def _cut(part: LowRank | None, columns: slice) -> LowRank | None:
    return None if part is None else LowRank(part.down, part.up[:, columns].contiguous())


def _lora_part(part: LowRank | None, outputs: int) -> LoraPart:
    if part is None:
        return LoraPart(None, None, 0, outputs)
    return LoraPart(part.down.data_ptr(), part.up.data_ptr(), len(part.down), outputs)


def _groups(weights: list[Weight]) -> int:
    """Returns the most groups of inputs that a quantized one of the weights has."""
    return max((weight.inputs // weight.group for weight in weights if weight.bits), default=0)


def _inner_sizes(config: ModelConfig) -> list[int]:
    """Returns the inner sizes of all MLPs, experts and shared experts."""
    if (experts := config.experts) is None:
        return [config.intermediate_size]
    found = [experts.inner, *([experts.shared_inner] if experts.shared_inner else [])]
    return found if len(experts.layers) == config.num_layers else [*found, config.intermediate_size]


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
