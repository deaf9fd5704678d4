"""Step times of the null engine: the model of an accelerator that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StepTime:
    """Parameters of a step's time: the time of its prompt tokens, plus that of a decode step if any sequence decodes.

    (prompt tokens / prefill_tokens_per_s + decode_step_s + decoding sequences * decode_sequence_s) / speedup

    Raises ValueError naming a field out of range.
    """

    prefill_tokens_per_s: float = 8192.0
    decode_step_s: float = 0.010
    decode_sequence_s: float = 0.0001
    speedup: float = 1.0

    __pydantic_config__ = {"extra": "forbid"}  # when it is parsed as a setting  # noqa: RUF012

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_zero = getattr(self, field.name), field.name.startswith("decode")
            if not (0 < value < float("inf") or (may_be_zero and value == 0)):
                raise ValueError(
                    f"{field.name}: {value} is not a finite number {'from 0 up' if may_be_zero else '> 0'}"
                )

    def seconds(self, num_tokens: Iterable[int]) -> float:
        """Returns the seconds of a step with these token counts, one a sequence; a count of 1 is a decode."""
        counts = list(num_tokens)
        decodes = counts.count(1)
        decode = self.decode_step_s + decodes * self.decode_sequence_s if decodes else 0.0
        return ((sum(counts) - decodes) / self.prefill_tokens_per_s + decode) / self.speedup
