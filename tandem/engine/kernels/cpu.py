"""The C kernels as operations on tensors: `Ops` for bfloat16 on the CPU.

load ── pack: each weight changes its layout in place, so it is held once ──> linear, embedding read it packed
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from tandem.engine.models import ModelConfig

_MAX_SHARE, _MAX_HEAD_DIM = 16, 256  # the sizes of attend_one's arrays
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "tandem_pack": [_POINTER, *[_INT] * 3],
    "tandem_unpack_rows": [_POINTER, _POINTER, _INT, _INT, _POINTER],
    "tandem_linear": [*[_POINTER] * 5, *[_INT] * 5],
    "tandem_rms_norm": [*[_POINTER] * 3, _INT, _INT, ctypes.c_float, _INT],
    "tandem_silu_mul": [_POINTER, _POINTER, *[_INT] * 3],
    "tandem_rope": [*[_POINTER] * 5, *[_INT] * 4, ctypes.c_float, _INT],
    "tandem_write_kv": [*[_POINTER] * 4, *[_INT] * 5],
    "tandem_attention": [*[_POINTER] * 6, *[_INT] * 7],
}


class CpuKernels:
    """Bfloat16 operations of one loaded library. Every tensor is on the CPU; every weight was packed first."""

    angle_dtype = torch.float32

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None

    @staticmethod
    def fits(config: ModelConfig) -> bool:
        """Whether the model's sizes are multiples of what the kernels work in."""
        heads = config.num_heads + 2 * config.num_kv_heads
        outputs = (heads * config.head_dim, config.hidden_size, 2 * config.intermediate_size, config.vocab_size)
        share = config.num_heads // config.num_kv_heads
        return (
            math.gcd(*outputs, config.head_dim) % 32 == 0 and config.head_dim <= _MAX_HEAD_DIM and share <= _MAX_SHARE
        )

    def pack(self, weight: Tensor) -> None:
        """Change the layout of `weight` (outputs, inputs) in place."""
        self._library.tandem_pack(weight.data_ptr(), *weight.shape, torch.get_num_threads())

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        out = weight.new_empty(len(ids), weight.shape[1])
        self._library.tandem_unpack_rows(
            weight.data_ptr(), ids.data_ptr(), len(ids), weight.shape[1], out.data_ptr()
        )  # fmt: skip
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias, residual, x.new_empty(len(x), weight.shape[0]))

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._linear(x, weight, None, None, x.new_empty(len(x), weight.shape[0], dtype=torch.float32))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
        outputs, inputs = weight.shape
        self._library.tandem_linear(
            x.data_ptr(), weight.data_ptr(), _pointer(bias), _pointer(residual), out.data_ptr(), len(x), inputs,
            outputs, out.dtype == torch.float32, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._library.tandem_rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps, torch.get_num_threads()
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._library.tandem_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def split_heads(
        self, qkv: Tensor, heads: tuple[int, int], norms: tuple[Tensor, Tensor] | None, eps: float, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms and turns q and k where they lie."""
        (num_heads, kv_heads), (cos, sin) = heads, angles
        head_dim = qkv.shape[1] // (num_heads + 2 * kv_heads)
        q_norm, k_norm = norms or (None, None)
        self._library.tandem_rope(
            qkv.data_ptr(), _pointer(q_norm), _pointer(k_norm), cos.data_ptr(), sin.data_ptr(), len(qkv), num_heads,
            kv_heads, head_dim, eps, torch.get_num_threads(),
        )  # fmt: skip
        q, k, v = torch.split(qkv.view(len(qkv), -1, head_dim), [num_heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    def write_kv(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        _, _, kv_heads, block_size, head_dim = kv.shape
        self._library.tandem_write_kv(
            kv.data_ptr(), slots.data_ptr(), k.data_ptr(), v.data_ptr(), len(k), k.stride(0), kv_heads, block_size,
            head_dim,
        )  # fmt: skip

    def attention(self, q: Tensor, kv: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, out: Tensor) -> None:
        """Single tokens q (tokens, heads, head_dim) over contexts of `lengths` (tokens,) int64 tokens, into `out`.

        The blocks of token i are `tables` (int32) from `starts[i]` (int64) on.
        """
        _, _, kv_heads, block_size, head_dim = kv.shape
        self._library.tandem_attention(
            q.data_ptr(), kv.data_ptr(), tables.data_ptr(), starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
            len(q), q.stride(0), q.shape[1], kv_heads, block_size, head_dim, torch.get_num_threads(),
        )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
