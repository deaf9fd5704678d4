"""Attention by the C kernels for float32 on the CPU, which gather nothing and read only keys that a token sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tandem.engine.float32 import MAX_HEAD_DIM, Float32Kernels, StepRows, float32_kernels
from tandem.engine.forward.attention import StepAttend, TorchAttention
from tandem.engine.models import Scope


class Float32Attention(TorchAttention):
    """PagedAttention by the float32 kernels on the CPU; `fixed` is torch's."""

    gathered_layers = 0

    def __init__(self, kv: Tensor, kernels: Float32Kernels) -> None:
        super().__init__(kv)
        self._kernels = kernels

    def planned(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepAttend:
        rows = StepRows(counts, lengths, tables)

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scope: Scope) -> Tensor:
            return self._kernels.attend(q, kv, rows, scope.window)

        return attend


def cpu_attention_for(kv: Tensor, scopes: Iterable[Scope]) -> TorchAttention:
    """Returns the attention for a cache on the CPU: the kernels' if they can compute all `scopes`, else torch's."""
    is_known = kv.dtype is torch.float32 and kv.shape[4] <= MAX_HEAD_DIM
    is_known = is_known and all(scope.is_plain and not scope.is_latent for scope in scopes)
    kernels = float32_kernels() if is_known else None
    return TorchAttention(kv) if kernels is None else Float32Attention(kv, kernels)
