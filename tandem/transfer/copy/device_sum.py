"""The checksum of a payload that lies on a device, computed there by a few torch operations.

    sum over words of mixed(word) * weight(place)      in int64 that wraps around

Weights are odd and pseudo-random, so the sum changes with any single word, and if words or blocks change places.
Integers wrap around alike everywhere, so a CPU and a GPU agree.
"""

from __future__ import annotations

import numpy as np
import torch

MASK = 2**64 - 1
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, odd


class DeviceSum:
    """Computes sums on `device`; keeps there as many weights as the longest payload so far has words."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = torch.empty(0, dtype=torch.int64, device=device)

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the sum of int64 words as one int64 on their device, without waiting for the device."""
        flat = words.reshape(-1)
        if len(flat) > len(self._weights):
            self._weights = torch.from_numpy(weights(len(flat))).to(self._device)
        mixed = flat * _MULTIPLIER
        mixed ^= mixed >> 32
        return (mixed * self._weights[: len(flat)]).sum()


def weights(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the first `count` outputs of splitmix64, made odd."""
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31)) | np.uint64(1)).view(np.int64)
