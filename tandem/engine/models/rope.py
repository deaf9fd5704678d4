"""Rotary position embedding, in the rotate-half form that Hugging Face checkpoints are written for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.engine.models.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position for each pair of channels: (head_dim / 2,) float32."""
    inverse = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        # Waves that turned often enough within the original context stay; ones that hardly turned slow down.
        turns = rope.original_max_position * inverse / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return inverse * (keep + (1 - keep) / rope.factor)
    return inverse


def cos_sin(inverse: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of `positions` (tokens,): (2, tokens, 1, head_dim / 2)."""
    angles = positions.to(torch.float32)[:, None, None] * inverse
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of `x` (tokens, heads, head_dim) by its token's angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
