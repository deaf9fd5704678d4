"""The structs that the kernels share with Python; the loader compares `SIZES` with the compiled library's."""

from __future__ import annotations

import ctypes

from tandem.engine.scheduling import DRAW

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Weight(ctypes.Structure):
    """`struct weight` of packing.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("bytes", "panels", "rare")),
        *((name, _INT) for name in ("outputs", "inputs", "bits", "group", "scale_type")),
        ("order", _POINTER),
    ]


class Panel(ctypes.Structure):
    """`struct panel` of packing.h."""

    _fields_ = [("base", ctypes.c_int32), ("first_rare", ctypes.c_int32)]


class Rare(ctypes.Structure):
    """`struct rare` of packing.h."""

    _fields_ = [("at", ctypes.c_uint32), ("value", ctypes.c_float)]


class ExpertsStruct(ctypes.Structure):
    """`struct experts` of model.h."""

    _fields_ = [
        ("router", Weight),
        *((name, _POINTER) for name in ("gate_up", "down", "router_bias", "gate_up_bias", "down_bias")),
    ]


class Mixture(ctypes.Structure):
    """`struct mixture` of model.h."""

    _fields_ = [
        *((name, _INT) for name in ("count", "per_token", "inner", "is_of_chosen", "has_shared_gate")),
        *((name, _POINTER) for name in ("scores", "shares", "chosen", "groups", "sorted")),
        ("scale", ctypes.c_float),
    ]


class Layer(ctypes.Structure):
    """`struct layer` of model.h."""

    _fields_ = [
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        ("experts", _POINTER),
        ("norms", _POINTER * 4),
        *(
            (name, _POINTER)
            for name in ("qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias", "sinks")
        ),
        *((name, _INT) for name in ("angles", "window")),
        ("kv", _POINTER),
    ]


class Columns(ctypes.Structure):
    """`struct columns` of model.h."""

    _fields_ = [("first", _INT), ("of", _INT)]


class RanksStruct(ctypes.Structure):
    """`struct ranks` of model.h."""

    _fields_ = [(name, _POINTER) for name in ("meetings", "arrive", "wait", "met")]


class ModelStruct(ctypes.Structure):
    """`struct model` of model.h."""

    _fields_ = [
        ("layers", _POINTER),
        ("head", Weight),
        ("norm", _POINTER),
        ("opened", _POINTER),
        ("opened_size", _INT),
        ("x_sums", _POINTER),
        ("mixture", _POINTER),
        ("inverse", _POINTER),
        *((name, _INT) for name in ("angles", "rotated", "interleaved", "norms_all")),
        *((name, _INT) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "block_size")),
        *((name, _INT) for name in ("block_stride", "value_stride", "kv_int8", "activation")),
        *((name, ctypes.c_float) for name in ("eps", "weights_from", "residual_scale")),
        *((name, ctypes.c_float) for name in ("attention_scale", "attention_softcap")),
        ("factors", ctypes.c_float * 2),
        ("ranks", _POINTER),
        *((name, Columns) for name in ("attended", "outputs", "inner", "vocabulary")),
    ]


class LoraPart(ctypes.Structure):
    """`struct lora_part` of model.h."""

    _fields_ = [("down", _POINTER), ("up", _POINTER), ("rank", _INT), ("outputs", _INT)]


class Step(ctypes.Structure):
    """`struct step` of model.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "normed", "qkv", "attended", "inner", "plain", "ordered", "cos", "sin")),
        *((name, _POINTER) for name in ("positions", "slots", "starts", "lengths", "table_starts", "tables")),
        *((name, _POINTER) for name in ("near_slots", "near_tables", "adapters", "added")),
        *((name, _INT) for name in ("rows", "seqs")),
    ]


_SHARED = (Weight, Panel, Rare, ExpertsStruct, Mixture, Layer, RanksStruct, ModelStruct, LoraPart, Step)
SIZES = {struct.__name__: ctypes.sizeof(struct) for struct in _SHARED}
SIZES["Draw"] = DRAW.size  # `struct draw` of sampling.h
