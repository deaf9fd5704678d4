"""The checksum of a payload that lies on a device, computed there by a few torch operations.

    sum over words of mixed(word) * weight(place)      in int64 that wraps around

A weight is odd and looks random, so a changed word always changes the sum, and words or blocks that change places do.
Integers wrap around alike everywhere, so a CPU and a GPU agree.
"""

from __future__ import annotations

import numpy as np
import torch

MASK = 2**64 - 1
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, odd


class DeviceSum:
    """For payloads on `device`; keeps as many weights there as the longest payload so far has words."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = torch.empty(0, dtype=torch.int64, device=device)

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        """Sums int64 words to one int64 on their device, still being computed perhaps."""
        flat = words.reshape(-1)
        if len(flat) > len(self._weights):
            self._weights = torch.from_numpy(weights(len(flat))).to(self._device)
        mixed = flat * _MULTIPLIER
        mixed ^= mixed >> 32
        return (mixed * self._weights[: len(flat)]).sum()


def weights(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The first `count` outputs of splitmix64, made odd."""
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31)) | np.uint64(1)).view(np.int64)
