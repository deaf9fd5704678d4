"""The bundle for a machine without network fits its parts; what is run there says what it found, whatever fails."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.bare import Errand, run, stages, whole
from benchmarks.gpu.bundle import ROOT, cut, needs, parts, requirements


def test_wheels_are_those_that_were_tested_with() -> None:
    found = requirements((ROOT / "constraints.txt").read_text())
    assert "grpcio==" in " ".join(found)
    assert not [name for name in found if name.startswith(("torch", "cupy", "numpy"))], "the machine has these"
    with pytest.raises(ValueError, match="no version of annotated-doc"):
        requirements("grpcio==1.0")


def test_what_a_wheel_needs_there_is_read_from_it(tmp_path: Path) -> None:
    texts = (
        "Typing_Extensions>=4; python_version < '3.13'",
        "tomli; python_version < '3.11'",
        "b; extra == 'aws'",
        "click",
    )
    lines = ["Metadata-Version: 2.1", "Name: x", *(f"Requires-Dist: {text}" for text in texts)]
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as packed:
        packed.writestr("x-1.dist-info/METADATA", "\n".join(lines))
    assert needs(tmp_path / "x.whl") == {"typing-extensions", "click"}


def test_parts_hold_all_and_no_more_than_may_be_carried() -> None:
    assert parts({"a": 95, "b": 40, "c": 5, "d": 50}, 100) == [["a", "c"], ["d", "b"]]
    with pytest.raises(ValueError, match="big: "):
        parts({"big": 101}, 100)


def test_a_wheel_that_is_too_large_is_cut_and_whole_where_it_is_installed(tmp_path: Path) -> None:
    for number, name in enumerate(("large.whl", "small.whl")):
        (tmp_path / f"part{number}").mkdir()
        (tmp_path / f"part{number}" / name).write_bytes(bytes(range(250 if number == 0 else 50)))
    cut(tmp_path / "part0", 100)
    (tmp_path / "part0" / "large.whl.1").rename(tmp_path / "part1" / "large.whl.1")
    assert {path.name: path.stat().st_size for path in whole(tmp_path)} == {"small.whl": 50, "large.whl": 250}
    assert (tmp_path / "large.whl").read_bytes() == bytes(range(250))


def test_stages_go_from_the_smallest_to_the_largest(tmp_path: Path) -> None:
    names = [stage.name for stage in stages(tmp_path, tmp_path / "site", tmp_path)]
    tests, measured = ["transports", "engine", "cluster"], ["gpu-engine", "gpu-transfer", "gpu-serving"]
    assert names == ["install", "device", *tests, *measured, "vllm"]


def test_each_result_is_written_whatever_fails(tmp_path: Path) -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    todo = [
        Errand("fine", python("print('figure 7', flush=True)"), 60),
        Errand("fails", python("raise SystemExit('broken')"), 60),
        Errand("hangs", python("import time; print('begun', flush=True); time.sleep(600)"), 5),
        Errand("absent", ["/nowhere/at-all"], 5),
        Errand("needed", python("raise SystemExit(3)"), 60, needed=True),
        Errand("never", python("print('no')"), 60),
    ]
    found = run(todo, tmp_path, os.environ)
    assert found["fine"] == 0
    assert (found["fails"], found["hangs"], found["needed"]) == (1, "not done in 5 s", 3)
    assert str(found["absent"]).startswith("not begun: ")
    assert "never" not in found
    written = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [result["stage"] for result in written] == [stage.name for stage in todo[:5]]
    assert [result["status"] for result in written] == list(found.values())
    assert ["figure 7" in written[0]["tail"], "broken" in written[1]["tail"], "begun" in written[2]["tail"]] == [
        True
    ] * 3
