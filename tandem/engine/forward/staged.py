"""Inputs of a replayed step: written on the host, sent in one copy to where the device always reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.device import Uploads


class Staged:
    """A row of whole numbers in `device`'s memory, `padding` at first."""

    def __init__(self, padding: Tensor, device: torch.device) -> None:
        self._padding, self._uploads = padding, Uploads(device)
        self._host = padding.pin_memory() if device.type == "cuda" else padding.clone()
        self.device = padding.to(device, copy=True)

    def blank(self) -> Tensor:
        """The host's row, padding again, once it was copied to the device: write to it, then `send`."""
        self._uploads.done()
        return self._host.copy_(self._padding)

    def send(self) -> None:
        self.device.copy_(self._host, non_blocking=True)
        self._uploads.begun()
