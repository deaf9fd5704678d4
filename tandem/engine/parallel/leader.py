"""The leader's forward pass: it has the other ranks compute each step with it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.engine.forward import Forward, StepInput
from tandem.engine.parallel.exchange import RankExchange
from tandem.engine.parallel.rooms import LOGITS_ROWS
from tandem.engine.parallel.sharded import ShardedDecoder
from tandem.engine.parallel.steps import AdapterMemory, LogitsMessage, packed


class RankedForward:
    """Runs `plain`, the forward pass of this rank's shard `model`, beside those of all other ranks."""

    def __init__(self, plain: Forward, model: ShardedDecoder, exchange: RankExchange) -> None:
        self._plain, self._model, self._exchange = plain, model, exchange
        self._adapters = AdapterMemory()

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        self._exchange.say(packed(self._adapters.message(step)))
        if written is None:
            return self._plain(step)
        layers = LayersBehind(written)
        hidden = self._plain(step, layers.written)
        layers.end()
        return hidden

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) <= LOGITS_ROWS:
            return self._logits(hidden, rows)
        starts = range(0, len(rows), LOGITS_ROWS)
        return torch.cat([self._logits(hidden, rows[start : start + LOGITS_ROWS]).clone() for start in starts])

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        self._exchange.say(packed(LogitsMessage(array("q", rows))))
        return self._plain.logits(hidden, rows)


class LayersBehind:
    """Calls `of_all` for a layer once all ranks have written its KV: that is certain when the leader, which meets them
    in each layer, has written the next layer's."""

    def __init__(self, of_all: Callable[[int], None]) -> None:
        self._of_all = of_all
        self._last: int | None = None

    def written(self, layer: int) -> None:
        self.end()
        self._last = layer

    def end(self) -> None:
        if self._last is not None:
            self._of_all(self._last)
