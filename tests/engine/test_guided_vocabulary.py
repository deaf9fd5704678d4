"""A model may have more logits than its tokenizer has words, or fewer: masks are as wide as the logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem import grammar
from tandem.grammar import Grammars
from tests.gateway.tiny_model import byte_level_tokenizer, write_model

WORDS = byte_level_tokenizer()


@pytest.mark.parametrize("more", [-7, 0, 1, 64, 1000])
def test_masks_are_as_wide_as_the_logits(tmp_path: Path, more: int) -> None:
    vocab_size = WORDS.get_vocab_size() + more
    guide = Grammars(write_model(tmp_path), vocab_size).start(grammar.of_json_schema({"type": "object"}))
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    guide.fill(mask.ctypes.data, mask.nbytes, [[]])
    allowed = [i for i in range(32 * len(mask)) if mask[i // 32] >> i % 32 & 1]
    assert WORDS.token_to_id("{") in allowed
    assert max(allowed) < min(vocab_size, WORDS.get_vocab_size())
    assert not guide.follow(list(WORDS.encode("{}").ids))
