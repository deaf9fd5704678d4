"""The sampler's choice of tokens in C."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Rows

from torch import Tensor

from tandem.engine.sampling import Masks
from tandem.engine.scheduling import Row

_LOGITS_A_THREAD = 2**20  # half a millisecond of work; waking another thread takes a tenth of that


class CpuChoose:
    """A `Choose` for logits on the CPU. `num_threads` is called if there is work for several threads."""

    def __init__(self, library: ctypes.CDLL, num_threads: Callable[[], int]) -> None:
        self._library, self._num_threads = library, num_threads

    def __call__(self, logits: Tensor, seqs: Rows[Row], masks: Masks | None = None) -> list[int]:
        logits = logits.contiguous()
        draws = b"".join([seq.draw for seq in seqs])
        indices, token_ids = array("q", [seq.num_output_tokens for seq in seqs]), array("q", bytes(8 * len(seqs)))
        threads = 1 + logits.numel() // _LOGITS_A_THREAD
        if threads > 1:
            threads = min(threads, self._num_threads())
        status = self._library.tandem_sample(
            logits.data_ptr(), None if masks is None else masks.ctypes.data, *logits.shape, draws,
            indices.buffer_info()[0], token_ids.buffer_info()[0], threads,
        )  # fmt: skip
        if status:
            raise MemoryError("no memory to sample with")
        return token_ids.tolist()
