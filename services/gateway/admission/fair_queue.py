"""The order in which choices enter the cluster.

    class     realtime, interactive, batch      fair shares by weight, tokens; realtime wins ties
      tenant                                    fair shares by weight, tokens, within the class
        choice                                  the one that has to begin first, strictly; then in order of arrival

A choice has to begin in time for its deadline, and for its target to the first token. Why that orders only one tenant's
own choices: both are what a client says. If they ordered tenants too, the one that asks for the shortest would have the
cluster to itself. Where there is one tenant, they order the class.
A class that has been idle begins at the virtual time, so a sporadic realtime request is next whatever batch has queued.

What a choice costs is its prompt and all that it may write; at its end the tokens it did not write are refunded.
No clock and no asyncio here: a simulator may drive it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf

from services.gateway.admission.fair_share import FairShare, Party
from services.gateway.admission.priority import PriorityClass

# Idle tenants that are owed nothing are forgotten once there are more than this.
MIN_REMEMBERED = 64
# The least effective weight, so that a party that has little of its work here is not held back too long after.
LEAST_HERE = 1 / 16
# Decay of what classes were given lately, for each choice taken.
FADES = 1 - 1 / 64
ROUNDS = 8


@dataclass(slots=True, eq=False)
class Work:
    """One choice as the queue sees it. Sizes are in tokens."""

    priority_class: PriorityClass
    tenant: str
    deadline: float  # on the event loop's clock
    prompt_tokens: int
    max_new_tokens: int
    ttft_s: float | None = None  # TTFT target; None: its deadline
    end_by: float = inf  # the request's own deadline: work that would end later is refused immediately
    look_up: Callable[[], int] | None = None  # returns the prompt's cached tokens; called at most once
    cached: int = 0  # its result
    new_tokens: int = 0  # tokens written so far
    start_by: float = inf  # the latest useful turn, on the event loop's clock; set before it waits
    arrival: int = 0  # set by the queue
    entered_at: float = 0.0  # on the event loop's clock, as
    line_s: float = 0.0  # at its entry: seconds to prefill what is before it and itself, at measured rates
    first_at: float = 0.0  # time of its first token
    is_probe: bool = False  # admitted although it may need more blocks than are expected to be free
    hurries: bool = False  # inside, it might miss its deadline if it had to wait

    @property
    def cost(self) -> int:
        return self.prompt_tokens + self.max_new_tokens

    @property
    def to_prefill(self) -> int:
        """Prompt tokens to compute, as far as known."""
        return self.prompt_tokens - self.cached

    @property
    def unused(self) -> int:
        return max(0, self.max_new_tokens - self.new_tokens)


class _Tenant(Party):
    def __init__(self, name: str, weight: float, rank: int) -> None:
        super().__init__(name, weight, rank)
        self.works: list[Work] = []  # next one last
        self.tokens = 0  # their sum

    def tokens_before(self, work: Work, until: float) -> int:
        """Returns the tokens of works before this one (waiting or not) and of those that must begin before `until`.

        Newcomers usually stand at the end."""
        own = _last_first(work)
        place = bisect_left(self.works, min(own, (-until, 0.0)), key=_last_first)
        behind = sum(other.cost for other in self.works[:place])
        waits = bisect_left(self.works, own, key=_last_first)
        return self.tokens - behind - (work.cost if self.works[waits : waits + 1] == [work] else 0)


class _Class(Party):
    def __init__(self, kind: PriorityClass, weight: float) -> None:
        super().__init__(kind.label, weight, kind)
        self.share = FairShare[_Tenant]()
        self.tenants: dict[str, _Tenant] = {}
        self.num_waiting = 0
        self.given = 0.0  # tokens given lately, decayed
        self.forget_above = MIN_REMEMBERED

    @property
    def tokens(self) -> int:
        """Tokens of all waiting work."""
        return sum(tenant.tokens for tenant in self.tenants.values())

    def first(self) -> Work:
        return self.share.waiting[0].works[-1]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights above 0: of each class, and of tenants; 1 for tenants not named."""

    classes: Mapping[PriorityClass, float]
    tenants: Mapping[str, float] = field(default_factory=dict)

    def of_class(self, kind: PriorityClass) -> float:
        return self.classes[kind]

    def of_tenant(self, tenant: str) -> float:
        return self.tenants.get(tenant, 1.0)


@dataclass(frozen=True, slots=True)
class TenantLine:
    """The waiting work of one tenant in one class."""

    priority_class: PriorityClass
    tenant: str
    num_waiting: int
    tokens: int


class FairQueue:
    """The waiting work of all classes and tenants. Work that was taken is settled by `correct` when it ends."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._share = FairShare[_Class]()
        self._classes = {kind: _Class(kind, weights.of_class(kind)) for kind in PriorityClass}
        self._tenants_here: Mapping[tuple[PriorityClass, str], float] = {}
        self._numbers = count()
        self._to_prefill = 0  # prompt tokens to compute of all waiting work

    def __bool__(self) -> bool:
        return bool(self._share.waiting)

    def __len__(self) -> int:
        return sum(group.num_waiting for group in self._classes.values())

    def __iter__(self) -> Iterator[Work]:
        """Iterates in no order."""
        return (w for group in self._classes.values() for tenant in group.tenants.values() for w in tenant.works)

    def weigh(self, classes: Mapping[PriorityClass, float], tenants: Mapping[tuple[PriorityClass, str], float]) -> None:
        """Scale weights to the shares of classes and tenants that are available at this gateway; 1 if not named."""
        self._tenants_here = tenants
        for kind, group in self._classes.items():
            group.weight = self.weights.of_class(kind) * max(classes.get(kind, 1.0), LEAST_HERE)
            for name, tenant in group.tenants.items():
                tenant.weight = self._weight(kind, name)

    def take_over(self, weights: Weights) -> None:
        """Replace weights; they apply in full until the next `weigh`."""
        self.weights = weights
        self.weigh({}, self._tenants_here)

    def num_waiting(self, kind: PriorityClass) -> int:
        return self._classes[kind].num_waiting

    def lines(self) -> list[TenantLine]:
        """Returns the lines, longest first."""
        tenants = ((kind, tenant) for kind, group in self._classes.items() for tenant in group.share.waiting)
        lines = (TenantLine(kind, tenant.name, len(tenant.works), tenant.tokens) for kind, tenant in tenants)
        return sorted(lines, key=lambda line: -line.tokens)

    def push(self, work: Work) -> None:
        work.arrival = next(self._numbers)
        group = self._classes[work.priority_class]
        tenant = self._tenant(group, work)
        if not tenant.works:
            group.share.join(tenant)
        if not group.num_waiting:
            self._share.join(group)
        insort(tenant.works, work, key=_last_first)
        tenant.tokens += work.cost
        self._to_prefill += work.to_prefill
        group.num_waiting += 1

    def pass_through(self, work: Work) -> None:
        """Push and take work in one step, as nothing waits."""
        work.arrival = next(self._numbers)
        group = self._classes[work.priority_class]
        self._give(group, work.cost)
        self._share.pass_through(group, work.cost)
        group.share.pass_through(self._tenant(group, work), work.cost)
        _forget(group)

    def first(self) -> Work | None:
        """Returns the work whose turn it is."""
        return self._share.waiting[0].first() if self._share.waiting else None

    def passing(self) -> Iterator[Work]:
        """Yields the first works of more urgent classes, which may pass the first one where only they have room,
        as long as the first work then waits for at most twice as much other work."""
        if self._share.waiting:
            group = self._share.waiting[0]
            until = group.start + group.first().cost / group.weight
            for other in self._share.waiting[1:]:
                if other.rank < group.rank and other.start <= until:
                    yield other.first()

    def take(self, passing: Work | None = None) -> Work:
        """Returns the first work, or `passing`, removed and charged to its tenant and class."""
        work = passing or self._share.waiting[0].first()
        group = self._classes[work.priority_class]
        tenant = group.tenants[work.tenant]
        self._give(group, work.cost)
        self._share.take(group, work.cost)
        group.share.take(tenant, work.cost)
        self.remove(work)
        return work

    def _give(self, group: _Class, tokens: int) -> None:
        for other in self._classes.values():
            other.given *= FADES
        group.given += tokens

    def tokens_ahead(self, work: Work, until: float) -> int:
        """Returns about how many tokens others are given before this work's turn.

        Parties are served by weight until each has what stands before it, or nothing left.

        What comes later counts too. Of other classes as much as they were given lately; of its own tenant, all that
        waits and has to begin before `until`, for it might have to go first to be in time.
        """
        group = self._classes[work.priority_class]
        tenant = group.tenants.get(work.tenant)
        weight = tenant.weight if tenant else self._weight(work.priority_class, work.tenant)
        own = work.cost + (tenant.tokens_before(work, until) if tenant else 0)
        others = (other for other in group.tenants.values() if other is not tenant and other.works)
        within = own + sum(min(other.tokens, own * other.weight / weight) for other in others)
        return round(self._beside(group, within)) - work.cost

    def _beside(self, group: _Class, within: float) -> float:
        """Returns the tokens that other classes are given while this one gets `within`."""
        given = sum(other.given for other in self._classes.values()) or 1.0
        others = [other for other in self._classes.values() if other is not group]
        waits = [other.tokens for other in others]
        parts = [other.given / given for other in others]
        most = [within * other.weight / group.weight for other in others]
        all_ = within + sum(most)
        for _ in range(ROUNDS):
            comes = (tokens + all_ * part for tokens, part in zip(waits, parts, strict=True))
            all_ = within + sum(map(min, comes, most))
        return all_

    def remove(self, work: Work) -> None:
        """Remove work that waits no longer."""
        group = self._classes[work.priority_class]
        tenant = group.tenants[work.tenant]
        place = bisect_left(tenant.works, _last_first(work), key=_last_first)
        assert tenant.works[place] is work
        del tenant.works[place]
        tenant.tokens -= work.cost
        self._to_prefill -= work.to_prefill
        group.num_waiting -= 1
        if not tenant.works:
            group.share.leave(tenant)
            _forget(group)
        if not group.num_waiting:
            self._share.leave(group)

    def correct(self, work: Work) -> None:
        """Refund tokens that taken work did not use, when it ends."""
        group = self._classes[work.priority_class]
        self._share.correct(group, work.unused, bool(group.num_waiting))
        if tenant := group.tenants.get(work.tenant):
            group.share.correct(tenant, work.unused, bool(tenant.works))

    @property
    def prefill_part(self) -> float:
        """Returns the part of all waiting tokens that must be prefilled."""
        tokens = sum(group.tokens for group in self._classes.values())
        return self._to_prefill / tokens if tokens else 0.0

    def know(self, work: Work, cached: int) -> None:
        """Note how many tokens of waiting work are cached."""
        self._to_prefill += work.cached - cached
        work.cached = cached

    def last(self) -> Work:
        """Returns the work to drop when too many wait: the last one of the tenant with most waiting.

        Ties go to the least urgent class, then to the tenant that came last."""
        tenants = (
            ((len(tenant.works), kind, tenant.rank), tenant)
            for kind, group in self._classes.items()
            for tenant in group.share.waiting
        )
        return max(tenants)[1].works[0]

    def check_integrity(self) -> list[str]:
        """Returns a line for each contradiction of counts, or between sharing parties and waiting work."""
        problems = []
        for kind, group in self._classes.items():
            waiting = [tenant for tenant in group.tenants.values() if tenant.works]
            if not group.share.holds(waiting):
                problems.append(f"{kind.label}: tenants that wait are not those that share")
            if any(tenant.tokens != sum(work.cost for work in tenant.works) for tenant in waiting):
                problems.append(f"{kind.label}: a tenant's tokens are not those of its work that waits")
            if sum(len(tenant.works) for tenant in waiting) != group.num_waiting:
                problems.append(f"{kind.label}: {group.num_waiting} counted as waiting")
        if self._to_prefill != sum(work.to_prefill for work in self):
            problems.append("tokens to prefill are not those of the work that waits")
        if not self._share.holds(group for group in self._classes.values() if group.num_waiting):
            problems.append("classes that wait are not those that share")
        return problems

    def _tenant(self, group: _Class, work: Work) -> _Tenant:
        name, known = work.tenant, group.tenants.get(work.tenant)
        if known is None:
            weight = self._weight(work.priority_class, name)
            known = group.tenants[name] = _Tenant(name, weight, next(self._numbers))
        return known

    def _weight(self, kind: PriorityClass, tenant: str) -> float:
        return self.weights.of_tenant(tenant) * max(self._tenants_here.get((kind, tenant), 1.0), LEAST_HERE)


def _last_first(work: Work) -> tuple[float, float]:
    return -min(work.deadline, work.start_by), -work.arrival


def _forget(group: _Class) -> None:
    """Forget tenants that would start at the virtual time anyway. Called now and then, as it costs time."""
    if len(group.tenants) <= group.forget_above:
        return
    now = group.share.virtual_time
    group.tenants = {name: t for name, t in group.tenants.items() if t.works or t.start > now}
    group.forget_above = 2 * len(group.tenants) + MIN_REMEMBERED
