"""Rotary position embedding: pairs of a head's first numbers are rotated by angles of their token's position.

A pair is number i of either half, or, interleaved, numbers 2i and 2i + 1.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from tandem.engine.models.config import Rope

# Cosines and sines: (2, tokens, 1, pairs).
Angles: TypeAlias = Tensor


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """Returns the radians per position of each pair of `dim` channels: (dim / 2,) float32."""
    inverse = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "longrope":
        return inverse / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        # Frequencies that turn often within the original context stay; frequencies that hardly turn are slowed down.
        turns = rope.original_max_position * inverse / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return inverse * (keep + (1 - keep) / rope.factor)
    if rope.kind == "yarn":
        keep = 1 - _ramp(rope, dim)
        return inverse * (keep + (1 - keep) / rope.factor)
    return inverse


def _ramp(rope: Rope, dim: int) -> Tensor:
    """Returns for each pair 0 if it turns `beta_fast` times within the original context, rising to 1 at `beta_slow`."""
    low, high = (
        dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)


def cos_sin(inverse: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Angles:
    """Returns the cosines and sines of the angles at `positions` (tokens,), multiplied by `factor`."""
    angles = positions.to(torch.float32)[:, None, None] * inverse
    found = torch.stack((angles.cos(), angles.sin()))
    return (found if factor == 1 else found * factor).to(dtype)


def rotate(x: Tensor, angles: Angles, interleaved: bool = False) -> Tensor:
    """Rotates each head of `x` (tokens, heads, head_dim) by its token's angles."""
    cos, sin = angles
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    found = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found
