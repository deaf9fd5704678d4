"""Memory of requests refused as poison: the same request is refused immediately and kills no more workers.

Requests are the same if workers would compute the same, apart from the seed. Each gateway learns by itself.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from services.gateway.errors import Poison
from tandem.v1 import llm_pb2, worker_pb2

KEPT_S = 600.0
MAX_KEPT = 1024


class Convictions:
    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[float, Poison]] = {}  # with expiry times, oldest first

    def add(self, sequence: worker_pb2.SequenceSpec, verdict: Poison) -> None:
        self._kept[_digest(sequence)] = asyncio.get_running_loop().time() + KEPT_S, verdict
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def check(self, sequence: worker_pb2.SequenceSpec) -> None:
        """Raises Poison."""
        now = asyncio.get_running_loop().time()
        while self._kept and (oldest := next(iter(self._kept.items())))[1][0] <= now:
            del self._kept[oldest[0]]
        if self._kept and (found := self._kept.get(_digest(sequence))):
            raise Poison(found[1].incarnations)


def _digest(sequence: worker_pb2.SequenceSpec) -> bytes:
    """Returns a digest of prompt, adapter and sampling parameters, without tokens written after the prompt."""
    sampling = llm_pb2.SamplingParams()
    sampling.CopyFrom(sequence.sampling)
    sampling.ClearField("seed")
    prompt = sequence.token_ids[: len(sequence.token_ids) - sequence.num_prior_tokens]
    asked = worker_pb2.SequenceSpec(token_ids=prompt, sampling=sampling, adapter=sequence.adapter)
    return blake2b(asked.SerializeToString(deterministic=True), digest_size=16).digest()
