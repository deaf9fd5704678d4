"""Who an engine names on its crash page while it computes, and suspects that compute alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from tandem.containment.crash_page import CrashPage, death_of
from tandem.engine import Engine, EngineConfig, Request, SamplingParams, StepTime
from tandem.grammar import Grammars, Guide, of_regex
from tests.engine.tiny import SIZES, assert_idle, generate, greedy, make_engine, prompt_of

FAST = StepTime(speedup=1e6)
# Of a step, however many sequences are in it.
BOUND_S = 10e-6


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}), encoding="utf-8")
    return folder


class WatchedEngine:
    """A null engine, and whom its page names in the middle of each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.named: list[dict[str, int]] = []
        self.tokens: dict[str, list[int]] = {}
        engine.crash_page.begin("one")

    def step(self) -> None:
        for output in self.engine.step(self._looked_at()):
            self.tokens.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    def found(self) -> dict[str, int]:
        death = death_of(self.engine.crash_page.read(), "SIGSEGV")
        assert death is not None
        return dict(death.named)

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        self.named.append(self.found())
        yield


def request(name: str, length: int, tokens: int = 10, **more: int) -> Request:
    return Request(name, prompt_of(length, seed=length), greedy(tokens), choice_id=f"choice {name}", **more)


def watched(folder: Path, **config: int) -> WatchedEngine:
    return WatchedEngine(make_engine(folder, null=FAST, max_num_batched_tokens=16, **config))


def test_a_step_names_who_is_in_it_and_how_far(config_only: Path) -> None:
    page = watched(config_only)
    page.engine.add(request("a", 20))
    page.engine.add(request("b", 30))
    page.step()
    page.step()
    assert page.named == [{"choice a": 0}, {"choice a": 0, "choice b": 0}]
    page.run()
    assert page.named[-1].items() <= {"choice b": 9}.items()
    places = [named["choice a"] for named in page.named if "choice a" in named]
    assert places == sorted(places)
    assert places[-1] == 9
    assert page.found() == {}
    assert_idle(page.engine)


def test_a_suspect_computes_alone_until_it_is_past_the_place(config_only: Path) -> None:
    expected = {
        n: generate(make_engine(config_only, null=FAST), prompt_of(n, seed=n), greedy(12)) for n in (20, 21, 40)
    }
    page = watched(config_only)
    for length in (20, 21):
        page.engine.add(request(str(length), length, 12))
    page.step()
    page.engine.add(request("40", 40, 12, alone_until=4))
    assert page.engine.num_suspects == 1
    page.run()
    with_it = [named for named in page.named if "choice 40" in named]
    assert [named["choice 40"] for named in with_it if len(named) == 1][:6] == [0, 0, 0, 1, 2, 3]
    assert all(named["choice 40"] >= 4 for named in with_it if len(named) > 1)
    assert any(len(named) == 3 for named in with_it), "it is one of many again"
    assert page.engine.num_suspects == 0
    assert {name: page.tokens[str(name)] for name in expected} == expected
    assert_idle(page.engine)


def test_those_that_begin_apart_begin_one_by_one(config_only: Path) -> None:
    """And with all others: one that is at its place in a crash is then the only one there."""
    page = watched(config_only)
    page.engine.add(request("20", 8, 60))
    page.step()
    for length in (6, 7, 40, 5):
        page.engine.add(request(str(length), length, 12, begins_apart=True))
    page.run()
    assert {name: len(tokens) for name, tokens in page.tokens.items()} == {"20": 60} | dict.fromkeys("67", 12) | {
        "40": 12, "5": 12
    }  # fmt: skip
    beginning = [[name for name, place in named.items() if name != "choice 20" and place < 2] for named in page.named]
    assert max(map(len, beginning)) == 1
    assert [place for named in page.named if (place := named.get("choice 40", 9)) < 3] == [0, 0, 0, 0, 1, 2]
    assert len({"choice 6", "choice 7", "choice 5"} & max(page.named, key=len).keys()) > 1, "they run together then"
    assert page.engine._scheduler.apart == {}
    assert_idle(page.engine)


def test_those_that_begin_apart_wait_for_blocks_as_others_do(config_only: Path) -> None:
    page = watched(config_only, num_blocks=16)
    for i in range(8):
        page.engine.add(request(str(i), 20 + i, 20, begins_apart=i % 2))
    page.run()
    assert {name: len(tokens) for name, tokens in page.tokens.items()} == dict.fromkeys("01234567", 20)
    assert_idle(page.engine)


def test_an_aborted_one_that_begins_apart_keeps_nobody_waiting(config_only: Path) -> None:
    page = watched(config_only)
    page.engine.reserve(request("a", 20, begins_apart=True))
    page.engine.add(request("b", 40, begins_apart=True))
    page.engine.add(request("c", 20, begins_apart=True))
    page.step()
    assert page.named == [{"choice b": 0}]
    page.engine.abort("b")
    page.run()
    page.engine.abort("a")
    assert len(page.tokens["c"]) == 10
    assert_idle(page.engine)


def test_others_go_on_beside_a_suspect(config_only: Path) -> None:
    """Every other step is theirs."""
    page = watched(config_only)
    page.engine.add(request("20", 8, 40))
    page.step()
    page.engine.add(request("40", 100, 2, alone_until=1))
    before = len(page.tokens["20"])
    for _ in range(12):
        page.step()
    assert len(page.tokens["20"]) - before == 6


def test_a_suspect_waits_for_blocks_as_others_do(config_only: Path) -> None:
    page = watched(config_only, num_blocks=16)
    for i in range(4):
        page.engine.add(request(str(i), 20 + i, 20))
    page.engine.add(replace(request("suspect", 40, 20), alone_until=5))
    page.run()
    assert {name: len(tokens) for name, tokens in page.tokens.items()} == dict.fromkeys("0123", 20) | {"suspect": 20}
    assert all(set(named) == {"choice suspect"} for named in page.named if named.get("choice suspect", 9) < 5)
    assert_idle(page.engine)


def test_an_aborted_suspect_leaves_nothing(config_only: Path) -> None:
    page = watched(config_only)
    page.engine.reserve(request("a", 20, alone_until=5))
    page.engine.add(request("b", 20))
    page.step()
    assert page.engine.num_suspects == 1
    assert page.named == [{"choice b": 0}]
    page.engine.abort("a")
    page.engine.abort("b")
    assert page.engine.num_suspects == 0
    assert page.found() == {}
    assert_idle(page.engine)


def test_to_say_it_costs_little(config_only: Path, tmp_path: Path) -> None:
    """A step of 512 that brings each a token writes one number for all of them."""
    page = CrashPage.at(tmp_path / "page")
    engine = make_engine(config_only, null=FAST, num_blocks=4096, max_num_batched_tokens=512, max_num_seqs=512)
    engine.crash_page = page
    page.begin("one")
    for i in range(512):
        engine.add(Request(f"{os.urandom(16).hex()}-{i}", [i % 90 + 1], greedy(30)))
    engine.step()
    engine.step()
    batch, taken = engine._scheduler.schedule(), []
    assert len(batch) == 512
    for _ in range(1000):
        start = perf_counter()
        engine._note(batch)
        page.stepped()
        taken.append(perf_counter() - start)
    print(f"{median(taken) * 1e6:.2f} us a step")
    assert median(taken) < BOUND_S


def test_a_mask_names_whose_it_is(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(demo_model, "demo", dtype="float32", num_blocks=64))
    engine.crash_page.begin("one")
    found: list[dict[str, int]] = []
    fill, compiled = Guide.fill, Grammars.compile

    def look() -> None:
        death = death_of(engine.crash_page.read(), "SIGSEGV")
        assert death is not None
        found.append(dict(death.named))

    def filled(self: Guide, *arguments: Any) -> None:
        look()
        fill(self, *arguments)

    def looked_at(self: Grammars, text: str) -> Any:
        look()
        return compiled(self, text)

    monkeypatch.setattr(Guide, "fill", filled)
    monkeypatch.setattr(Grammars, "compile", looked_at)
    engine.add(Request("plain", [5, 6, 7], greedy(3)))
    held = SamplingParams(max_tokens=3, temperature=0.0, grammar=of_regex("[a-z]{9}"), stop_token_ids=frozenset({0}))
    engine.add(Request("guided", [5, 6, 7], held))
    assert found == [{"guided": 0}], "while it is compiled"
    while engine.has_work():
        engine.step()
    assert found[1:4] == [{"guided": 0}, {"guided": 1}, {"guided": 2}]
