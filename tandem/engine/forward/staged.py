"""Inputs of a replayed step: written on the host and sent in one copy to a fixed place in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.device import Uploads


class Staged:
    """A row of integers in `device`'s memory and its copy on the host; `padding` is the initial contents."""

    def __init__(self, padding: Tensor, device: torch.device) -> None:
        self._padding, self._uploads = padding, Uploads(device)
        self._host = padding.pin_memory() if device.type == "cuda" else padding.clone()
        self.device = padding.to(device, copy=True)

    def blank(self) -> Tensor:
        """Resets the host's row to padding, after its last copy to the device is done, and returns it for writing."""
        self._uploads.done()
        return self._host.copy_(self._padding)

    def send(self) -> None:
        self.device.copy_(self._host, non_blocking=True)
        self._uploads.begun()
