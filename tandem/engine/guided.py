"""Grammars on a step's logits: one bitmask for all rows that have one."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from tandem.engine.sequence import Row


def apply_grammars(adjusted: Tensor, logits: Tensor, seqs: Rows[Row]) -> None:
    """Mask in `adjusted` (rows, vocab_size) what the rows' grammars do not allow.

    Where nothing is left, as when a grammar ends before min_tokens, the row begins anew from the model's own `logits`.
    A row whose answer does not follow its grammar gets its `error` set.
    """
    guided = [row for row, seq in enumerate(seqs) if seq.guide is not None]
    if not guided:
        return
    forbidden = _forbidden([seqs[row] for row in guided], logits.shape[1]).to(logits.device)
    masked = adjusted[guided].masked_fill_(forbidden, -math.inf)
    empty = masked.amax(dim=-1) == -math.inf
    if bool(empty.any()):
        masked[empty] = logits[guided][empty].masked_fill_(forbidden[empty], -math.inf)
    adjusted[guided] = masked


def _forbidden(seqs: Rows[Row], vocab_size: int) -> Tensor:
    """(rows, vocab_size) bool."""
    masks = np.full((len(seqs), -(-vocab_size // 32)), -1, np.int32)
    for mask, seq in zip(masks, seqs, strict=True):
        assert seq.guide is not None
        known = seq.token_ids[seq.answer_start : len(seq.token_ids) - len(seq.ahead)]
        if wrong := seq.guide.follow(known):
            seq.error = f"the answer does not follow its grammar: {wrong}"
        else:
            # Tokens proposed ahead that the grammar forbids are not drawn, so what would follow them does not matter.
            seq.guide.fill(mask.ctypes.data, mask.nbytes, seq.ahead)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits) == 0
