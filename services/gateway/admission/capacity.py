"""The cluster's capacity, and the work that is in it.

    tokens          KV blocks of the decode workers: a choice may come to hold its prompt and all that it may write
    sequences       seats in the decode workers' batches, and those whose prompts are prefilled meanwhile; more urgent
                    work gets them from less urgent that has time
    prompt tokens   sent to workers that prefill and not prefilled yet: more would only wait there, out of order. Some
                    prompts each are let through whatever their length: much of them may be cached

Blocks are counted as if no two choices shared any and all were as long as they may be. They are not, so beyond the
count one choice at a time is let in as long as its forerunners of the same or a more urgent class have all got their
blocks, which their first token tells.
In a cluster that is really full that one waits at a decode worker, where more urgent ones pass it by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from services.gateway.admission.fair_queue import Work
from services.gateway.admission.priority import PriorityClass
from tandem.registry import LiveWorker, Role

PROMPTS_PER_PREFILLER = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    tokens: int
    sequences: int
    prompt_tokens: int
    prompts: int  # prompts that may wait to be prefilled whatever their tokens
    max_tokens: int | None = None  # never exceeded, whatever the gateways' shares
    prefill_tokens_per_s: float = 0.0  # of all prefilling workers; 0: not measured yet

    def times(self, part: float) -> Capacity:
        """Returns a gateway's part of the capacity, which has room for one choice at least."""
        most = self.max_tokens
        return Capacity(
            tokens=round(self.tokens * part),
            sequences=max(1, round(self.sequences * part)),
            prompt_tokens=round(self.prompt_tokens * part),
            prompts=max(1, round(self.prompts * part)),
            max_tokens=None if most is None else round(most * part),
            prefill_tokens_per_s=self.prefill_tokens_per_s * part,
        )

    def filled_by(self, work: Work) -> float:
        """Returns the largest part of a resource that the work fills."""
        tokens = min(self.tokens, self.max_tokens or self.tokens)
        prefilling = 0.0 if work.new_tokens else work.prompt_tokens / self.prompt_tokens
        return max(work.cost / tokens, 1 / self.sequences, prefilling)


def capacity_of(
    workers: Sequence[LiveWorker], prefill_queue_tokens: int, max_tokens: int | None, decodes_prefill: bool
) -> Capacity | None:
    """Returns the workers' capacity; None without a decode worker, where the router reports what is missing.

    Args:
        prefill_queue_tokens: prompt tokens that may wait at each prefilling worker.
        max_tokens: of the answer.
        decodes_prefill: decode workers prefill beside prefill workers, and not only where there are none.
    """
    live = [worker for worker in workers if not worker.load.draining]
    decodes = [worker.info for worker in live if worker.info.role is Role.DECODE]
    if not decodes:
        return None
    prefill = live if decodes_prefill or len(decodes) == len(live) else [w for w in live if w.info.role is Role.PREFILL]
    rates = [rate for worker in prefill if (rate := worker.load.prefill_tokens_per_s)]
    prefillers = len(prefill)
    return Capacity(
        tokens=sum(info.num_blocks * info.block_size for info in decodes),
        sequences=sum(info.max_num_seqs for info in decodes) + (len(live) - len(decodes)) * PROMPTS_PER_PREFILLER,
        prompt_tokens=prefillers * prefill_queue_tokens,
        prompts=prefillers * PROMPTS_PER_PREFILLER,
        max_tokens=max_tokens,
        prefill_tokens_per_s=prefillers * sum(rates) / len(rates) if rates else 0.0,
    )


class Admitted:
    """The work inside the cluster. Anything fits while the cluster is empty or its capacity unknown."""

    def __init__(self) -> None:
        self.capacity: Capacity | None = None
        self.tokens = 0
        self.prompt_tokens = 0
        self._inside: dict[Work, None] = {}  # in the order of entry
        self._prefilling: set[Work] = set()
        self._prompts = [0] * len(PriorityClass)  # tokens to prefill, by class

    def __contains__(self, work: Work) -> bool:
        return work in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self) -> Iterator[Work]:
        """Iterates, oldest first."""
        return iter(self._inside)

    def __reversed__(self) -> Iterator[Work]:
        """Iterates, newest first."""
        return reversed(self._inside)

    def fits(self, work: Work) -> bool:
        capacity = self.capacity
        if capacity is None or not self._inside:
            return True
        if not self._has_seat(work.priority_class, capacity.sequences):
            return False
        if capacity.max_tokens is not None and self.tokens + work.cost > capacity.max_tokens:
            return False
        many = len(self._prefilling) >= capacity.prompts
        if many and self.prompt_tokens + work.prompt_tokens > capacity.prompt_tokens:
            return False
        return not self.is_probe(work) or not self._is_probed(work.priority_class)

    def is_probe(self, work: Work) -> bool:
        """True if the work needs more blocks than are expected to be free."""
        if self.capacity is None or not self._inside:
            return False
        return self.tokens + work.cost > self.capacity.tokens

    def yielded_to(self, kind: PriorityClass) -> int:
        """Returns the tokens of less urgent work, whose blocks work of this class may take."""
        capacity = self.capacity
        if capacity is None or capacity.max_tokens is not None or not self._has_seat(kind, capacity.sequences):
            return 0
        return sum(work.cost for work in self._inside if work.priority_class > kind)

    def prompts_before(self, work: Work) -> int:
        """Returns the prompt tokens that workers prefill before this work's."""
        own = work.to_prefill if work in self._prefilling else 0
        return sum(self._prompts[: work.priority_class + 1]) - own

    @property
    def mean_to_prefill(self) -> float:
        """Returns the mean number of prompt tokens of work to prefill."""
        return sum(self._prompts) / len(self._prefilling) if self._prefilling else 0.0

    def prefilling(self) -> Collection[Work]:
        return self._prefilling

    def know(self, work: Work, cached: int) -> None:
        """Note how many tokens of admitted work are cached."""
        if work in self._prefilling:
            self._prompts[work.priority_class] += work.cached - cached
        work.cached = cached

    def prefill_s(self, tokens: float) -> float:
        """Returns the seconds to prefill tokens at the workers' measured rate; 0 if unknown."""
        rate = self.capacity.prefill_tokens_per_s if self.capacity else 0.0
        return tokens / rate if rate else 0.0

    def enter(self, work: Work) -> None:
        self._inside[work] = None
        self._prefilling.add(work)
        self.tokens += work.cost
        self.prompt_tokens += work.prompt_tokens
        self._prompts[work.priority_class] += work.to_prefill

    def prefilled(self, work: Work) -> None:
        """Note the first token of work: its prompt is computed and its blocks are taken."""
        if work in self._prefilling:
            self._prefilling.remove(work)
            self.prompt_tokens -= work.prompt_tokens
            self._prompts[work.priority_class] -= work.to_prefill

    def leave(self, work: Work) -> None:
        self.prefilled(work)
        del self._inside[work]
        self.tokens -= work.cost

    def check_integrity(self) -> list[str]:
        """Returns a line for each counter that contradicts the work inside."""
        sums = {
            "tokens": (self.tokens, sum(work.cost for work in self._inside)),
            "prompt tokens": (self.prompt_tokens, sum(work.prompt_tokens for work in self._prefilling)),
            "tokens to prefill": (sum(self._prompts), sum(work.to_prefill for work in self._prefilling)),
            "prefilling and not inside": (len(self._prefilling - self._inside.keys()), 0),
        }
        return [f"{name}: {is_} where {should} should be" for name, (is_, should) in sums.items() if is_ != should]

    def _has_seat(self, kind: PriorityClass, seats: int) -> bool:
        """True if a seat is free, or less urgent work can give one up without missing its deadline.

        Engines choose which work gives up its seat, so none is counted on while any of it is in a hurry."""
        if len(self._inside) < seats:
            return True
        less_urgent = [work for work in self._inside if work.priority_class > kind]
        return len(self._inside) - len(less_urgent) < seats and not any(work.hurries for work in less_urgent)

    def _is_probed(self, kind: PriorityClass) -> bool:
        return any(work.priority_class <= kind for work in self._prefilling)
