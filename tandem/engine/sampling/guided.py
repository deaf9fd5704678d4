"""Grammars in a step: a bit for each row of logits and each token, set if the grammar allows the token next."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.containment import CrashPage
from tandem.engine.device import sent
from tandem.engine.scheduling import Row, Sequence
from tandem.grammar import Guide


class NamedGuide(Guide):
    """A guide that notes on the crash page, while it works, that its sequence's grammar is at work."""

    def __init__(self, guide: Guide, seq: Sequence, page: CrashPage) -> None:
        self._guide, self._seq, self._page = guide, seq, page

    def follow(self, tokens: Rows[int]) -> str:
        self._page.masking(self._seq.slot)
        wrong = self._guide.follow(tokens)
        self._page.masked()
        return wrong

    def forced(self) -> list[int]:
        self._page.masking(self._seq.slot)
        tokens = self._guide.forced()
        self._page.masked()
        return tokens

    def fill(self, pointer: int, size: int, aheads: Rows[Rows[int]]) -> str:
        self._page.masking(self._seq.slot)
        wrong = self._guide.fill(pointer, size, aheads)
        self._page.masked()
        return wrong


# Bits of allowed tokens: (rows, words of 32 tokens each).
Masks = NDArray[np.int32]


def masks_of(seqs: Rows[Row], vocab_size: int) -> Masks | None:
    """Returns the bits of tokens that each row's grammar allows next; None if no row has a grammar.

    Sets `error` of a row whose answer does not follow its grammar.
    """
    if all(seq.guide is None for seq in seqs):
        return None
    masks = np.full((len(seqs), -(-vocab_size // 32)), -1, np.int32)
    address, size = masks.ctypes.data, masks.strides[0]
    for guide, rows in groupby(range(len(seqs)), lambda row: seqs[row].guide):
        if guide is None:
            continue
        of_guide = list(rows)
        first = seqs[of_guide[0]]
        wrong = guide.follow(first.token_ids[first.answer_start : len(first.token_ids) - len(first.ahead)])
        wrong = wrong or guide.fill(address + of_guide[0] * size, size, [seqs[row].ahead for row in of_guide])
        if wrong:
            for row in of_guide:
                seqs[row].error = f"the answer cannot follow its grammar: {wrong}"
    return masks


def forbidden(masks: Masks, logits: Tensor) -> Tensor:
    """Returns True for each token whose bit is not set: bool, in the shape and on the device of `logits`."""
    words = sent(torch.from_numpy(masks), logits.device)
    bits = words[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32) & 1
    return bits.view(len(masks), -1)[:, : logits.shape[1]] == 0
