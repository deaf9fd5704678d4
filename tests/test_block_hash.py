from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from tandem.block_hash import block_hashes, next_hash, root_hash

ROOT = root_hash("model", "revision")


def test_a_part_filled_block_has_no_hash() -> None:
    assert len(block_hashes(ROOT, range(47), 16)) == 2
    assert len(block_hashes(ROOT, range(48), 16)) == 3


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80), st.integers(1, 16))
def test_the_chain_is_its_links(tokens: list[int], block_size: int) -> None:
    parent = ROOT
    for i, made in enumerate(block_hashes(ROOT, tokens, block_size)):
        parent = next_hash(parent, tokens[i * block_size : (i + 1) * block_size])
        assert made == parent


def test_model_revision_lora_and_salt_part_the_caches() -> None:
    roots = {root_hash("a", "b"), root_hash("ab", ""), root_hash("a", "b", "l"), root_hash("a", "b", "", "l")}
    assert len(roots) == 4


def test_equal_in_another_process() -> None:
    code = "from tandem.block_hash import *; print(block_hashes(root_hash('m', 'r'), list(range(32)), 16)[-1].hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=30)
    assert other.stdout.strip() == block_hashes(root_hash("m", "r"), list(range(32)), 16)[-1].hex()
