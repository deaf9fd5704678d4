"""EAGLE (arXiv 2401.15077) and EAGLE-3 (2503.01840): one decoder layer over features proposes tokens one by one.

1 observe   the model's features of a sequence, step after step
2 read      features whose next token is known, into the head's own keys and values of the sequence
3 draw      a token, k times, each from the feature that the head computed for the token before

The head keeps one layer's keys and values for each sequence, outside the KV cache, from the first position that this
engine computed on. They are freed with the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tandem.engine.forward import Chunk
from tandem.engine.sampling import Choose, draw
from tandem.engine.scheduling import Ahead, Sequence
from tandem.engine.speculation.eagle_head import Context, ContextPlace, EagleHead
from tandem.engine.speculation.proposer import Wanted
from tandem.speculative import MAX_NUM_TOKENS

MOST_UNREAD = 64  # a sequence's unread features; with more, the head reads them even if it does not propose


class EagleProposer:
    """Proposes by `head`. `method`: eagle or eagle3; `feature` makes features of the model's hidden states."""

    reads_first = False

    def __init__(self, method: str, head: EagleHead, feature: Callable[[Tensor], Tensor], choose: Choose) -> None:
        self._method, self._head, self._feature, self._choose = method, head, feature, choose
        self._contexts: WeakKeyDictionary[Sequence, Context] = WeakKeyDictionary()

    def observe(self, chunks: Items[Chunk], hidden: Tensor) -> None:
        if not any(chunk.seq.speculative.method == self._method for chunk in chunks):
            return
        features, row, unread = self._feature(hidden), 0, list[Sequence]()
        for seq, start, end in chunks:
            if seq.speculative.method == self._method:
                context = self._remember(seq, start, features[row : row + end - start])
                if len(context.features.rows) > MOST_UNREAD and seq.num_tokens - 1 > context.end:
                    unread.append(seq)
            row += end - start
        if unread:
            self._read(unread)

    def _remember(self, seq: Sequence, start: int, features: Tensor) -> Context:
        context = self._contexts.get(seq)
        if context is None or not context.first <= start <= context.features.end:
            context = self._contexts[seq] = Context(start, features, self._head.config)
        elif start + len(features) > context.end:  # features before `context.end` are read already
            new = max(start, context.end)
            context.features.put(new, features[new - start :])
        return context

    def _read(self, seqs: Items[Sequence]) -> Tensor:
        """Reads every feature whose next token is known; returns the head's output for the last feature of each
        sequence.
        """
        found, ids, positions, places = list[Tensor](), list[int](), list[int](), list[ContextPlace]()
        for seq in seqs:
            context = self._contexts[seq]
            first, end = context.end, min(seq.num_tokens - 1, context.features.end)
            found.append(context.features.rows[: end - first])
            ids += seq.token_ids[first + 1 : end + 1]
            positions += range(first, end)
            places.append(ContextPlace(context, context.count, end - first))
        made = self._run(torch.cat(found), ids, positions, places)
        for context, _, count in places:
            context.features.drop(count)
            context.count += count
        return made[torch.tensor([place.rows for place in places]).cumsum(0) - 1]

    def _run(self, features: Tensor, ids: list[int], positions: list[int], places: Items[ContextPlace]) -> Tensor:
        token_ids, at = (torch.tensor(values, device=features.device) for values in (ids, positions))
        return self._head(features, token_ids, at, places)

    @torch.inference_mode()
    def propose(self, wanted: Items[Wanted]) -> bool:
        going = [item for item in wanted if self._has_feature(item.seq)]
        if not going:
            return True
        most = max(item.seq.num_tokens - 1 - self._contexts[item.seq].end for item in going)
        features, ahead = self._read([item.seq for item in going]), 0
        while True:
            rows = [Ahead(seq, ahead) if ahead else seq for seq, _ in going]
            token_ids = draw(self._head.logits(features), rows, self._choose)
            for (seq, _), token_id in zip(going, token_ids, strict=True):
                if token_id >= 0:
                    seq.proposed.append(token_id)
            ahead += 1
            stay = [i for i, (seq, least) in enumerate(going) if least > ahead and len(seq.proposed) == ahead]
            if not stay:
                return most <= MAX_NUM_TOKENS + 1
            going = [going[i] for i in stay]
            contexts = [self._contexts[seq] for seq, _ in going]
            features = self._run(
                features[stay],
                [seq.proposed[-1] for seq, _ in going],
                [seq.num_tokens - 2 + ahead for seq, _ in going],
                [ContextPlace(context, context.count + ahead - 1, 1) for context in contexts],
            )

    def _has_feature(self, seq: Sequence) -> bool:
        """True if the feature of the hidden state that gave the last token is there and not read yet."""
        context = self._contexts.get(seq)
        return context is not None and context.end <= seq.num_tokens - 2 < context.features.end
