"""Grammars in a step: one bit for each row of logits and each token, set where the token may come next."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.device import sent
from tandem.engine.sequence import Row

# (rows, a word for 32 tokens each)
Masks = NDArray[np.int32]


def masks_of(seqs: Rows[Row], vocab_size: int) -> Masks | None:
    """None where no row has a grammar. A row whose answer does not follow its grammar gets its `error` set."""
    if all(seq.guide is None for seq in seqs):
        return None
    masks = np.full((len(seqs), -(-vocab_size // 32)), -1, np.int32)
    address, size = masks.ctypes.data, masks.strides[0]
    for row, seq in enumerate(seqs):
        if seq.guide is None:
            continue
        known = seq.token_ids[seq.answer_start : len(seq.token_ids) - len(seq.ahead)]
        if wrong := seq.guide.follow(known):
            seq.error = f"the answer does not follow its grammar: {wrong}"
        else:
            # Tokens proposed ahead that the grammar forbids are not drawn, so what would follow them does not matter.
            seq.guide.fill(address + row * size, size, seq.ahead)
    return masks


def forbidden(masks: Masks, logits: Tensor) -> Tensor:
    """Where a bit is not set: bool, shaped as `logits` and on its device."""
    words = sent(torch.from_numpy(masks), logits.device)
    bits = words[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32) & 1
    return bits.view(len(masks), -1)[:, : logits.shape[1]] == 0
