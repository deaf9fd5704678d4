"""How many tokens are proposed: as many as pay, and never so that more is lost than is stated."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import product, takewhile
from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, Request, SampledToken
from tandem.engine.scheduling.scheduler import Scheduled
from tandem.engine.scheduling.sequence import Sequence
from tandem.engine.speculation import Plan, Speculator
from tandem.engine.speculation.account import LOSS, MOST, SPREAD, Account
from tandem.engine.speculation.proposer import Wanted
from tandem.engine.step_cost import StepCost
from tandem.engine.step_time import StepTime
from tandem.speculative import Speculative
from tests.engine.test_speculation import sequence
from tests.engine.tiny import greedy

DEMO = Path(__file__).parents[2] / "models" / "demo"


def measured(base: float, each: float) -> Plan:
    """Steps are so long by a line, and no time is left for tries."""
    plan = Plan()
    for _ in range(100):
        plan.passed_plain(1, base + each)
        for rows in (3, 5):
            plan.passed(1, rows - 1, 0, base + each * rows)
    plan._tries_s = 0.0
    return plan


def told(plan: Plan, right: float) -> Sequence:
    seq = sequence()
    for _ in range(100):
        plan.verified(seq, 4, round(4 * right))
    return seq


def test_a_line_is_measured() -> None:
    cost = StepCost()
    for rows in (1, 3, 5) * 100:
        cost.add(rows, 8.0 + 0.5 * rows)
    base, each = cost.line()
    assert base == pytest.approx(8.0, rel=0.1)
    assert each == pytest.approx(0.5, rel=0.2)


def test_what_the_machine_took_is_not_blamed_on_a_step() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.add(2, 1.0)
    cost.add(2, 1000.0)
    assert cost.at(2) < 1.1


@pytest.mark.parametrize("longer", [3.0, 30.0])
def test_a_bad_moment_is_forgotten(longer: float) -> None:
    """The first steps with proposals took so many times as long: proposals that are right come all the same."""
    plan, seq, proposed = Plan(), sequence(), 0
    plan.passed_plain(1, 1.0)
    for i in range(3000):
        if count := plan.counts([seq], [4], 1)[0]:
            plan.proposed(1, count, 0.05)
            plan.passed(1, count, count, (1.0 + 0.05 * count) * (longer if i < 300 else 1.0))
            plan.verified(seq, count, count)
            proposed += count
        else:
            plan.passed_plain(1, 1.0)
    assert proposed > 2000


def test_one_pause_while_proposing_does_not_end_it_for_long() -> None:
    plan = measured(8.0, 0.1)
    seq = told(plan, 1.0)
    for _ in range(10):
        plan.proposed(1, 4, 0.4)
    plan.proposed(1, 4, 1e6)
    assert plan.counts([seq], [8], 1) == [8]


def test_as_many_as_pay() -> None:
    cheap, dear = measured(8.0, 0.1), measured(0.1, 8.0)
    assert cheap.counts([told(cheap, 1.0)], [8], 1) == [8]
    assert cheap.counts([told(cheap, 0.0)], [8], 1) == [0]
    assert 1 < cheap.counts([told(cheap, 0.5)], [16], 1)[0] < 8
    assert dear.counts([told(dear, 0.75)], [8], 1) == [0]
    chances = [told(cheap, 1.0), told(cheap, 0.0), told(cheap, 0.5)]
    assert cheap.counts(chances, [2, 2, 0], 3) == [2, 0, 0]


def test_a_full_batch_turns_it_off() -> None:
    plan = Plan()
    for rows in (1, 64, 128, 256) * 50:
        plan.passed_plain(rows, 1.0 + 0.1 * rows)
    plan._tries_s = 0.0
    seq = told(plan, 0.75)
    assert plan.counts([seq], [8], 1)[0] >= 4
    assert plan.counts([seq] * 256, [8] * 256, 256) == [0] * 256


def test_what_does_not_pay_is_tried_for_a_hundredth_of_the_time() -> None:
    plan = measured(10.0, 1.0)
    seq, steps, tried = told(plan, 0.0), 5000, 0
    for _ in range(steps):
        tried += sum(plan.counts([seq], [8], 1))
        plan.passed_plain(1, 11.0)
    assert 0 < tried <= steps * 11.0 * 0.01 * 1.1


@pytest.mark.parametrize("lost", [0.1, 1.0, 6.0])
def test_proposing_while_the_account_is_open_loses_no_more_than_is_stated(lost: float) -> None:
    """Plain steps of 2 s, and proposals that gain for a while, and then lose."""
    account, spent, chance = Account(), 0.0, random.Random(1)
    assert not account.is_open
    for steps in range(1, 3001):
        if account.is_open:
            gain = lost if steps < 300 and chance.random() < 0.6 else 0.0
            account.spend(lost)
            account.gain(gain)
            spent += (lost - gain) * (steps >= 300)
        account.earn(2.0, 1)
        assert spent <= LOSS * 2.0 * max(0, steps - 300) + MOST * 2.0 + lost + LOSS * 2.0
    assert spent > LOSS * 2.0 * 2700 * 0.99
    account.spend_later(100.0)
    for _ in range(3 * SPREAD):
        account.earn(0.0, 1)
    assert not account.is_open


class SpeculatedWorld:
    """Runner, proposer and clock: a step takes `step_s(rows)`, a pass of proposing `pass_s`, reading a sequence before
    the first one `read_s`; how often the j-th step's proposals are right is `chance(j)`."""

    def __init__(
        self, step_s: Callable[[int], float], chance: Callable[[int], float], pass_s: float = 0.0, read_s: float = 0.0
    ) -> None:
        self.step_s, self.chance, self.pass_s, self.read_s = step_s, chance, pass_s, read_s
        self.reads_first = read_s > 0
        self.seconds, self.steps, self._random, self._read = 0.0, 0, random.Random(5), set[str]()

    def now(self) -> float:
        return self.seconds

    def propose(self, wanted: Items[Wanted]) -> bool:
        unread = {seq.request_id for seq, _ in wanted} - self._read
        self._read |= unread
        self.seconds += self.read_s * len(unread) + self.pass_s * max(most for _, most in wanted)
        for seq, most in wanted:
            seq.proposed.extend(5 if self._random.random() < self.chance(self.steps) else 6 for _ in range(most))
        return not (unread and self.read_s)

    def execute(self, batch: list[Scheduled]) -> dict[str, list[SampledToken]]:
        self.steps += 1
        self.seconds += self.step_s(sum(item.num_tokens for item in batch))
        said = {}
        for item in batch:
            right = list(takewhile((5).__eq__, item.seq.proposed))
            said[item.seq.request_id] = [SampledToken(5)] * (1 + len(right))
        return said

    def spent(self, method: str, streams: int, answer: int) -> float:
        """Seconds for some rounds of answers, the first one's start included."""
        config = EngineConfig(DEMO / "target", "null", null=StepTime(), num_blocks=512)
        engine = Engine(config, now=self.now)
        engine._runner = self  # type: ignore[assignment]
        engine._speculator = Speculator(
            {"ngram": self}, engine._scheduler, engine.model_config.max_model_len, self.now, jump_forward=True
        )
        for number in range(ROUNDS * streams):
            engine.add(Request(str(number), [3], greedy(answer), speculative=Speculative(method)))
            if number % streams == streams - 1:
                while engine.has_work():
                    engine.step()
        return self.seconds


ROUNDS = 2
# Where a row costs a little, or a lot; where weights are all; where more rows than one cost a leap; where tiles count.
STEPS: dict[str, Callable[[int], float]] = {
    "line": lambda rows: 1.0 + 0.1 * rows,
    "arithmetic": lambda rows: 0.1 + 1.0 * rows,
    "weights": lambda rows: 1.0 + 0.01 * rows,
    "leap": lambda rows: 1.0 if rows in (1, 4) else 1.8 + 0.02 * rows,
    "tiles": lambda rows: float(-(-rows // 4)),
}
CHANCES: dict[str, Callable[[int], float]] = {
    "never right": lambda step: 0.0,
    "half": lambda step: 0.5,
    "right until it is trusted": lambda step: float(step % 120 < 20),
    "in turns": lambda step: float(step % 2),
}
METHODS = "none", "ngram"
COSTS = (0.0, 0.0), (0.5, 0.0), (0.5, 5.0)  # of a pass, and of reading before the first one


@pytest.mark.long
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("step", STEPS)
def test_it_never_takes_longer_than_is_stated(step: str, streams: int) -> None:
    """Answers of 200 tokens, one wave after the other."""
    for chance, costs in product(CHANCES, COSTS):
        plain, ahead = (SpeculatedWorld(STEPS[step], CHANCES[chance], *costs).spent(m, streams, 200) for m in METHODS)
        assert ahead <= plain / 0.95, (chance, costs, plain / ahead)


@pytest.mark.parametrize(("chance", "gain"), [(0.5, 1.35), (0.8, 2.2), (1.0, 4.2)])
def test_what_pays_is_done(chance: float, gain: float) -> None:
    plain, ahead = (SpeculatedWorld(STEPS["line"], lambda _: chance).spent(method, 1, 200) for method in METHODS)
    assert plain / ahead > gain


@pytest.mark.parametrize("slow", ["proposing", "verifying"])
def test_a_pause_in_the_first_try_does_not_end_it_for_long(slow: str) -> None:
    plan, seq, proposed = Plan(), sequence(), list[int]()
    for i in range(400):
        if count := plan.counts([seq], [4], 1)[0]:
            pause = 0.0 if proposed else 1e4
            plan.proposed(1, count, 0.05 + pause * (slow == "proposing"))
            plan.passed(1, count, count, 1.0 + 0.05 * count + pause * (slow == "verifying"))
            plan.verified(seq, count, count)
            proposed.append(i)
        else:
            plan.passed_plain(1, 1.0)
    assert len(proposed) > 100
