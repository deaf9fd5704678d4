"""How long a step of the null engine takes: the model of an accelerator that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: what its prompt tokens take, plus, where any sequence decodes, what a decode step takes.

    (prompt tokens / prefill_tokens_per_s + decode_step_s + decoding sequences * decode_sequence_s) / speedup

    ValueError names a field out of range.
    """

    prefill_tokens_per_s: float = 8192.0
    decode_step_s: float = 0.010
    decode_sequence_s: float = 0.0001
    speedup: float = 1.0

    __pydantic_config__ = {"extra": "forbid"}  # where it is a setting  # noqa: RUF012

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_zero = getattr(self, field.name), field.name.startswith("decode")
            if not (0 < value < float("inf") or (may_be_zero and value == 0)):
                raise ValueError(
                    f"{field.name}: {value} is not a finite number {'from 0 up' if may_be_zero else '> 0'}"
                )

    def seconds(self, num_tokens: Iterable[int]) -> float:
        """Seconds of a step with so many tokens of each sequence; a single one counts as decode."""
        counts = list(num_tokens)
        decodes = counts.count(1)
        decode = self.decode_step_s + decodes * self.decode_sequence_s if decodes else 0.0
        return ((sum(counts) - decodes) / self.prefill_tokens_per_s + decode) / self.speedup
