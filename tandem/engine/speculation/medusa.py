"""Medusa (arXiv 2401.10774): each head reads one feature and proposes a token. The first head proposes the token after
the one that the model draws from that feature, the second head the token after that, and so on.

A head is blocks of x + silu(linear(x)), followed by a matrix to the vocabulary. The feature is the model's last hidden
state, normed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.forward import Chunk
from tandem.engine.sampling import Choose, draw
from tandem.engine.scheduling import Ahead, Sequence
from tandem.engine.speculation.features import FeatureRows
from tandem.engine.speculation.heads import HeadFile
from tandem.engine.speculation.proposer import Wanted
from tandem.speculative import MAX_NUM_TOKENS


class MedusaHead(NamedTuple):
    """A head. `blocks`: each block's weight (hidden, hidden) and bias, if any; `out` (vocab, hidden)."""

    blocks: tuple[tuple[Tensor, Tensor | None], ...]
    out: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        for weight, bias in self.blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        return F.linear(x, self.out).float()


def medusa_heads(file: HeadFile, hidden: int, vocab_size: int, place: Tensor) -> list[MedusaHead]:
    """Makes the heads of `file`, in the dtype and on the device of `place`. Raises ValueError naming a wrong tensor."""
    heads, taken = [], set()

    def take(name: str, *shape: int) -> Tensor:
        taken.add(name)
        return file.take(name, *shape).to(place)

    for head in range(sum(name.endswith(".0.linear.weight") for name in file.tensors)):
        blocks = list[tuple[Tensor, Tensor | None]]()
        while (name := f"{head}.{len(blocks)}.linear") + ".weight" in file.tensors:
            bias = take(f"{name}.bias", hidden) if f"{name}.bias" in file.tensors else None
            blocks.append((take(f"{name}.weight", hidden, hidden), bias))
        heads.append(MedusaHead(tuple(blocks), take(f"{head}.head", vocab_size, hidden)))
    if extra := sorted(file.tensors.keys() - taken):
        raise ValueError(f"speculative_model: {file.folder}: {len(extra)} extra tensors: {', '.join(extra[:5])}")
    return heads


class MedusaProposer:
    """Proposes by Medusa heads. `feature` makes features of the model's hidden states."""

    reads_first = False

    def __init__(self, heads: Items[MedusaHead], feature: Callable[[Tensor], Tensor], choose: Choose) -> None:
        self._heads, self._feature, self._choose = heads, feature, choose
        self._rows: WeakKeyDictionary[Sequence, FeatureRows] = WeakKeyDictionary()

    def observe(self, chunks: Items[Chunk], hidden: Tensor) -> None:
        row = 0
        for seq, start, end in chunks:
            row += end - start
            if seq.speculative.method == "medusa":  # keep the last rows: the last accepted token's is among them
                few = min(end - start, MAX_NUM_TOKENS + 1)
                self._rows[seq] = FeatureRows(end - few, hidden[row - few : row].clone())

    @torch.inference_mode()
    def propose(self, wanted: Items[Wanted]) -> bool:
        going, found = list[Wanted](), list[Tensor]()
        for item in wanted:
            rows, position = self._rows.get(item.seq), item.seq.num_tokens - 2
            if rows is not None and rows.first <= position < rows.end:
                going.append(item)
                found.append(rows.rows[position - rows.first])
        features = self._feature(torch.stack(found)) if found else None
        for ahead, head in enumerate(self._heads):
            stay = [i for i, (seq, most) in enumerate(going) if most > ahead and len(seq.proposed) == ahead]
            if features is None or not stay:
                break
            going, features = [going[i] for i in stay], features[stay]
            rows_of = [Ahead(seq, ahead) if ahead else seq for seq, _ in going]
            for (seq, _), token_id in zip(going, draw(head(features), rows_of, self._choose), strict=True):
                if token_id >= 0:
                    seq.proposed.append(token_id)
        return True
