"""All that reads less for a token, together: speculation, LoRA, int8, grammars, the prefix cache, swap and migration.

Float32, where exactness is defined. What one sequence alone says, without speculation, cache or migration, it says in
one batch with all the others, with each, also where it has to leave its blocks and comes back to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoModelForCausalLM

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.grammar import of_regex
from tandem.speculative import HEADS, OFF, Speculative
from tests.engine.head_folders import make_heads
from tests.engine.peft_folders import make_adapter
from tests.engine.tiny import assert_idle

pytestmark = pytest.mark.long
DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENS, BLOCK = 10, 4
PROMPT = [i % 13 * 7 + 11 for i in range(50)]
GRAMMAR = of_regex(r"[a-z]{2,8}( [a-z]{2,8}){6,40}\.")
MANNERS = {
    "greedy": SamplingParams(max_tokens=TOKENS, temperature=0.0),
    "seeded": SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3),
    "guided": SamplingParams(
        max_tokens=TOKENS, temperature=0.8, seed=3, grammar=GRAMMAR, stop_token_ids=frozenset({0})
    ),
    "one of two": SamplingParams(  # of two tokens random heads are often right
        max_tokens=TOKENS, temperature=1.5, seed=3, allowed_token_ids=frozenset({30, 62})
    ),
}
Case = tuple[str | None, str]  # adapter, manner


class EngineKind(NamedTuple):
    """A kind of engine and of request to it. `ahead`: the method besides ngram."""

    ahead: str
    int8: bool
    adapters: Sequence[str | None]
    manners: Sequence[str]


KINDS = (
    EngineKind("draft", int8=False, adapters=(None, "a0", "a1"), manners=("greedy", "seeded", "guided")),
    EngineKind("draft", int8=True, adapters=(None, "a0"), manners=("guided",)),
    *(
        EngineKind(head, int8=head == "eagle3", adapters=(None, "a0"), manners=("guided", "one of two"))
        for head in HEADS
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, and heads by their methods."""
    folder = tmp_path_factory.mktemp("beside")
    for seed in range(2):
        make_adapter(folder / f"a{seed}", DEMO / "target", rank=4 + 4 * seed, seed=seed, size=0.1)
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype="float32")
    for method in HEADS:
        (folder / method).mkdir()
        make_heads(method, folder / method, model)
    return folder


def make(folder: Path, kind: EngineKind, num_blocks: int, swap_memory: int = 0) -> Engine:
    config = EngineConfig(
        DEMO / "target", "demo", dtype="float32", num_blocks=num_blocks, block_size=BLOCK, num_threads=1,
        quantization="int8" if kind.int8 else "none", kv_cache_dtype="int8" if kind.int8 else "auto", lora_dir=folder,
        speculative_model=DEMO / "draft" if kind.ahead == "draft" else folder / kind.ahead,
        swap_memory=swap_memory,
    )  # fmt: skip
    return Engine(config, now=lambda: 0.0)  # by this clock every proposal pays, and every swap


def request(engine: Engine, name: str, case: Case, method: str, written: Sequence[int] = ()) -> Request:
    adapter, manner = case
    assert engine.adapters is not None
    ref = engine.adapters.read(adapter, adapter) if adapter else None
    if grammar := MANNERS[manner].grammar:
        engine.grammars.compile(grammar)
    return Request(
        name, [*PROMPT, *written], MANNERS[manner], speculative=OFF if method == "none" else Speculative(method),
        num_prior_tokens=len(written), lora=ref, adapter=engine.adapters.get(ref) if ref else None,
    )  # fmt: skip


def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += [token.token_id for token in output.tokens]
    assert_idle(engine)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.ahead + " int8" * kind.int8)
def test_all_of_it_together_says_what_each_says_alone(folder: Path, kind: EngineKind) -> None:
    engine, cases = make(folder, kind, num_blocks=800), list(product(kind.adapters, kind.manners))
    alone = {case: answers(engine, [request(engine, "alone", case, "none")])["alone"] for case in cases}
    assert len({tuple(said) for said in alone.values()}) == len(cases)
    asked = {f"{case} {method}": (case, method) for case, method in product(cases, ("none", "ngram", kind.ahead))}
    tight = make(folder, kind, num_blocks=32, swap_memory=512 << 10)
    for there, written in ((engine, 0), (engine, 3), (tight, 0), (tight, 3)):
        # At first the prompt may be cached; then the answer's first tokens came from elsewhere.
        found = answers(
            there, [request(there, name, case, method, alone[case][:written]) for name, (case, method) in asked.items()]
        )
        assert found == {name: alone[case][written:] for name, (case, _) in asked.items()}
    assert engine.stats().num_accepted_tokens > 0
    assert tight.stats().num_swapped > 0
