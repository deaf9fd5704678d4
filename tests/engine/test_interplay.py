"""All that reads less for a token, together: speculation, LoRA, int8, grammars, the prefix cache and migration.

Float32, where exactness is defined. What one sequence alone says, without speculation, cache or migration, it says in
one batch with all the others, with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.grammar import of_regex
from tandem.speculative import OFF, Speculative
from tests.engine.peft_folders import make_adapter
from tests.engine.tiny import assert_idle

DEMO = Path(__file__).parents[2] / "models" / "demo"
METHODS, TOKENS = ("none", "ngram", "draft"), 10
PROMPT = [i % 13 * 7 + 11 for i in range(50)]
GRAMMAR = of_regex(r"[a-z]{2,8}( [a-z]{2,8}){6,40}\.")
MANNERS = {
    "greedy": SamplingParams(max_tokens=TOKENS, temperature=0.0),
    "seeded": SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3),
    "guided": SamplingParams(
        max_tokens=TOKENS, temperature=0.8, seed=3, grammar=GRAMMAR, stop_token_ids=frozenset({0})
    ),
}
Case = tuple[str | None, str]  # adapter, manner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in range(2):
        make_adapter(folder / f"a{seed}", DEMO / "target", rank=4 + 4 * seed, seed=seed, size=0.1)
    return folder


def make(folder: Path, quantization: str) -> Engine:
    config = EngineConfig(
        DEMO / "target", "demo", dtype="float32", num_blocks=400, num_threads=1, quantization=quantization,
        kv_cache_dtype="int8" if quantization == "int8" else "auto",
        lora_dir=folder, speculative_model=DEMO / "draft",
    )  # fmt: skip
    return Engine(config, now=lambda: 0.0)  # by this clock every proposal pays


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


@pytest.mark.parametrize(
    ("quantization", "adapters", "manners"),
    [("none", (None, "a0", "a1"), tuple(MANNERS)), ("int8", (None, "a0"), ("guided",))],
)
def test_all_of_it_together_says_what_each_says_alone(
    folder: Path, quantization: str, adapters: Sequence[str | None], manners: Sequence[str]
) -> None:
    engine, cases = make(folder, quantization), list(product(adapters, manners))
    alone = {case: answers(engine, [request(engine, "alone", case, "none")])["alone"] for case in cases}
    assert len({tuple(said) for said in alone.values()}) == len(cases)
    asked = {f"{case} {method}": (case, method) for case, method in product(cases, METHODS)}
    for written in (0, 3):  # the prompt is cached by now; then the answer's first tokens came from elsewhere
        found = answers(
            engine,
            [request(engine, name, case, method, alone[case][:written]) for name, (case, method) in asked.items()],
        )
        assert found == {name: alone[case][written:] for name, (case, _) in asked.items()}
    assert engine.stats().num_accepted_tokens > 0
