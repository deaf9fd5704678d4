"""Options of `tandem up` that name models, and how many workers each has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster import Cluster
from tandem.commands.up import DEMO_MODEL, UpSettings
from tandem.commands.up.models import need_of
from tandem.settings import load


def cluster(*options: str) -> Cluster:
    return load(UpSettings, options, "tandem up").found().cluster({})


def workers(made: Cluster) -> list[tuple[str, str, int]]:
    return [(pool.name, pool.model, pool.replicas) for pool in made.pools]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (folder := tmp_path / "Other.Model").mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_one_model_is_as_it_was() -> None:
    made = cluster(str(DEMO_MODEL), "--decode=2", "--prefill=0")
    assert [(model.id, model.name) for model in made.models] == [("model", "tandem-demo")]
    assert workers(made) == [("prefill", "model", 0), ("decode", "model", 2)]


def test_several_models_have_pools_of_their_own(other: Path) -> None:
    made = cluster(f"--model={other}", f"--model=demo={DEMO_MODEL}", "--decode=demo=3", "--prefill=2")
    found = [(model.id, model.name, model.weights.path) for model in made.models]
    assert found == [("other-model", "Other.Model", other), ("demo", "demo", DEMO_MODEL)]
    assert workers(made) == [
        ("other-model-prefill", "other-model", 2), ("other-model-decode", "other-model", 1),
        ("demo-prefill", "demo", 2), ("demo-decode", "demo", 3),
    ]  # fmt: skip
    assert len(made.gateway_services("redis://here")) == 1


def test_each_role_has_its_own_number_of_ranks() -> None:
    made = cluster(str(DEMO_MODEL), "--prefill-tensor-parallel=2")
    assert [pool.settings.get("tensor_parallel") for pool in made.pools] == [2, None]
    made = cluster(str(DEMO_MODEL), "--prefill-tensor-parallel=4", "--decode-tensor-parallel=1")
    assert [pool.settings.get("tensor_parallel") for pool in made.pools] == [4, 1]


def test_each_rank_is_a_process_that_takes_memory() -> None:
    alone, shared = (
        load(UpSettings, [str(DEMO_MODEL), "--decode=2", f"--decode-tensor-parallel={ranks}"], "tandem up").needs(100)
        for ranks in (1, 3)
    )
    assert [(need.weights, need.kv) for need in shared] == [(need.weights, need.kv) for need in alone]
    assert [need.overhead / alone[0].overhead for need in shared] == [1, 3, 3]
    assert need_of({"tensor_parallel": 3, "kv_memory": "512MiB"}, 100) == shared[1]


def test_one_may_stop_when_it_is_idle(other: Path) -> None:
    made = cluster(f"--model={other}", f"--model=demo={DEMO_MODEL}", "--idle-stop=demo=10m", "--awake-models=1")
    assert [(model.name, model.idle and model.idle.stop) for model in made.models] == [
        ("Other.Model", None), ("demo", 600.0),
    ]  # fmt: skip
    assert (made.awake.models, made.awake.memory) == (1, None)
    (model,) = cluster(str(DEMO_MODEL), "--idle-stop=tandem-demo").on_demand
    assert model.idle is not None
    assert model.idle.stop == 300.0


def test_two_of_one_model_under_two_names() -> None:
    made = cluster(f"--model=a.b={DEMO_MODEL}", f"--model=a-b={DEMO_MODEL}")
    assert [(model.id, model.name) for model in made.models] == [("a-b-0", "a.b"), ("a-b-1", "a-b")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((f"--model=a={DEMO_MODEL}", f"--model=a={DEMO_MODEL}"), "--model: a is there twice"),
        ((f"--model=a={DEMO_MODEL}", "--decode=b=2"), "--decode: b is no model; there is a"),
        ((f"--model=a={DEMO_MODEL}", str(DEMO_MODEL)), "--model: names all models; NAME"),
        ((f"--model=a={DEMO_MODEL}", "--idle-stop=b"), "--idle-stop: b is no model; there is a"),
        ((f"--model=a={DEMO_MODEL}", "--idle-stop=a=soon"), "idle.stop"),
        (("--model=a=/nowhere/at/all",), "/nowhere/at/all: is no folder or file here"),
    ],
)
def test_what_is_wrong_is_named(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cluster(*options)


@pytest.mark.parametrize(
    "option",
    [
        "--decode=0",
        "--decode=a=0",
        "--decode=a=",
        "--prefill=x",
        "--prefill=-1",
        "--decode-tensor-parallel=0",
        "--prefill-tensor-parallel=9",
    ],
)
def test_numbers_are_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cluster(f"--model=a={DEMO_MODEL}", option)
    assert option.partition("=")[0] in capsys.readouterr().err
