"""Places in the memory that ranks share: for the message of a step, and for what they compute together.

Pages of such memory are taken when they are first written, so generous room costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.engine.models import ModelConfig

PAGE = 4096
# Of a message: for each row, beside its block table (twice, for layers with a window), and for all.
ROW_BYTES, HEAD_BYTES = 64 << 10, 1 << 20
LOGITS_ROWS = 64  # rows of logits that are computed at once: each is as wide as the vocabulary
MOST_BYTES = 4  # of a number
ROWS_BEHIND = 31  # kernels read so many rows past the last one


@dataclass(frozen=True, slots=True)
class Rooms:
    """The first byte and the bytes of each place, by name, and `size`, the bytes of all. `max_rows`: the most tokens of
    a step."""

    at: Mapping[str, int]
    bytes_of: Mapping[str, int]
    size: int
    max_rows: int

    @classmethod
    def of(cls, config: ModelConfig, ranks: int, max_rows: int, most_blocks: int) -> Rooms:
        """Returns the places for a model; `most_blocks`: the blocks of its longest context."""
        experts, latent = config.experts, config.latent
        widths = {
            "hidden": config.hidden_size,
            "attended": config.num_heads * (latent.value if latent else config.head_dim),
            "heads": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim if config.qk_norm_of_all else 0,
            "inner": max(config.intermediate_size, experts.shared_inner if experts else 0),
            "experts": config.hidden_size * experts.per_token if experts else 0,
        }
        sizes = {"lines": (2 * ranks + 1) * 64, "message": HEAD_BYTES + max_rows * (ROW_BYTES + 8 * most_blocks)}
        sizes |= {name: (max_rows + ROWS_BEHIND) * width * MOST_BYTES for name, width in widths.items()}
        sizes["logits"] = LOGITS_ROWS * config.vocab_size * MOST_BYTES
        at, end = dict[str, int](), 0
        for name, size in sizes.items():
            at[name] = end
            end += -(-size // PAGE) * PAGE
        return cls(at, sizes, end, max_rows)
