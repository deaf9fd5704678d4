"""The bundle for a machine without network fits its parts; what is run there says what it found, whatever fails."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import options_of
from benchmarks.gpu.bare import Errand, environment_of, run, stages, unpack
from benchmarks.gpu.bundle import ARCHIVE, ROOT, WHEELS, cut, lacks, pack, requirements
from tandem.commands.up import UpSettings
from tandem.local import free_ports
from tandem.settings import load

# The program of vLLM, as far as it is told: its options, then a server in its place.
STAND_IN = """
import argparse, runpy, sys
parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["serve"])
parser.add_argument("model")
for name in ("served-model-name", "dtype", "host", "max-model-len", "kv-cache-memory-bytes", "max-num-batched-tokens"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--port", required=True)
told = parser.parse_args()
sys.argv = ["", told.model, f"--port={told.port}"]
runpy.run_module("benchmarks.servers.transformers_server", run_name="__main__")
"""


def test_wheels_are_those_that_were_tested_with() -> None:
    found = requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert "grpcio==" in " ".join(found)
    assert not [name for name in found if name.startswith(("torch", "cupy", "numpy"))], "the machine has these"
    with pytest.raises(ValueError, match="no version of annotated-doc"):
        requirements("grpcio==1.0")


def test_what_is_carried_needs_nothing_that_is_not_there(tmp_path: Path) -> None:
    needed = (
        "Typing_Extensions>=4; python_version < '3.13'",
        "tomli; python_version < '3.11'",
        "b; extra == 'aws'",
        "click",
        "cuda-tile",
    )
    for name, texts in (("x", needed), ("Granian", ("absent-here",))):
        lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {text}" for text in texts)]
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    assert lacks(tmp_path) == {"typing-extensions", "absent-here"}
    assert "typing-extensions" in WHEELS


def test_parts_are_put_together_where_they_are_unpacked_and_only_once(tmp_path: Path) -> None:
    site, there = tmp_path / "site", tmp_path / "there"
    (site / "bin").mkdir(parents=True)
    (site / "bin" / "program").write_bytes(os.urandom(250_000))
    (site / "bin" / "program").chmod(0o755)
    parts = cut(pack(site, tmp_path / ARCHIVE), 100_000)
    assert [part.name for part in parts] == [f"{ARCHIVE}.{number}" for number in range(3)]
    for number, part in enumerate(parts):
        part.rename((tmp_path / f"carried{number}").with_suffix(f".tar.xz.{number}"))
    for _ in range(2):
        unpack(tmp_path, there)
    assert (there / "bin" / "program").read_bytes() == (site / "bin" / "program").read_bytes()
    assert os.access(there / "bin" / "program", os.X_OK)
    (tmp_path / "large").write_bytes(bytes(501))
    with pytest.raises(SystemExit, match="more than 3"):
        cut(tmp_path / "large", 100)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_stages_command_is_one_that_its_program_takes(tmp_path: Path, device: str) -> None:
    todo = {stage.name: stage.command for stage in stages(tmp_path, tmp_path / "site", tmp_path, device)}
    tests, measured = ["transports", "engine", "flashinfer", "cluster"], ["engine", "transfer", "serving", "vllm"]
    assert list(todo) == ["install", "device", *tests, *(f"gpu-{part}" for part in measured)], "smallest first"
    ast.parse(todo["device"][2])
    for name in ("transports", "engine", "flashinfer"):
        (file,) = (ROOT / argument for argument in todo[name] if argument.startswith("tests/"))
        tests_there = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("def test_")]
        assert tests_there
        assert name != "flashinfer" or any("flashinfer" in line for line in tests_there)
    for part in measured:
        options = options_of(todo[f"gpu-{part}"][3:])
        assert (options.only, options.device, options.out) == (part, device, tmp_path / f"gpu-{part}.json")
    said = todo["cluster"][2].partition("tandem up ")[2]
    assert load(UpSettings, [said.split()[0].replace("-d", "--detach"), "--sample=import "], "tandem up").detach
    assert subprocess.run(["sh", "-n", "-c", todo["cluster"][2]], timeout=60).returncode == 0


def test_a_warning_of_another_release_ends_no_test_there(tmp_path: Path) -> None:
    (file := tmp_path / "test_old.py").write_text(
        "def test():\n import warnings\n warnings.warn('x', FutureWarning)", encoding="utf-8"
    )
    (command,) = (stage.command for stage in stages(tmp_path, tmp_path, tmp_path) if stage.name == "transports")
    there = [*command[:-1], "-c", str(ROOT / "pyproject.toml"), str(file)]
    here = [word for word in there if word not in ("-W", "default")]
    statuses = [subprocess.run(said, cwd=tmp_path, timeout=60, check=False).returncode for said in (there, here)]
    assert statuses == [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED]


def test_each_result_is_written_whatever_fails(tmp_path: Path) -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    tidies = "import time\ntry:\n time.sleep(600)\nfinally:\n print('tidied')"
    todo = [
        Errand("fine", python("print('figure 7', flush=True)"), 60),
        Errand("fails", python("raise SystemExit('broken')"), 60),
        Errand("hangs", python(tidies), 5),
        Errand("absent", ["/nowhere/at-all"], 5),
        Errand("needed", python("raise SystemExit(3)"), 60, needed=True),
        Errand("never", python("print('no')"), 60),
    ]
    found = run(todo, tmp_path, os.environ, 600)
    assert found["fine"] == 0
    assert (found["fails"], found["hangs"], found["needed"]) == (1, "not done in 5 s", 3)
    assert str(found["absent"]).startswith("not begun: ")
    assert "never" not in found
    assert run(todo[:1], tmp_path, os.environ, 0) == {"fine": "not begun: no time is left"}
    written = [json.loads(line) for line in (tmp_path / "bare.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [result["stage"] for result in written] == [*(stage.name for stage in todo[:5]), "fine"]
    assert [result["status"] for result in written[:5]] == list(found.values())
    for result, text in zip(written, ("figure 7", "broken", "tidied"), strict=False):
        assert text in result["tail"]
    assert "broken" not in written[2]["tail"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_of_it_runs_here_at_a_small_scale(tmp_path: Path) -> None:
    """Its tests skip, saying so; the cluster, every part of the benchmark and a peer are real processes."""
    site, out, bundle = tmp_path / "site", tmp_path / "out", tmp_path / "bundle"
    program = tmp_path / "carried" / "vllm" / "entrypoints" / "cli" / "main.py"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN, encoding="utf-8")
    bundle.mkdir()
    with tarfile.open(bundle / f"{ARCHIVE}.0", "w:xz") as archive:
        archive.add(tmp_path / "carried", ".")
    ports = zip(("TANDEM_HTTP_PORT", "TANDEM_GRPC_PORT", "TANDEM_REDIS_PORT"), map(str, free_ports(3)), strict=True)
    environment, found = environment_of(site, "cpu") | {"TMPDIR": str(tmp_path)}, dict[str, int | str]()
    for stage in stages(bundle, site, out, "cpu"):
        found |= run([stage], out, environment | (dict(ports) if stage.name == "cluster" else {}), 900)
    assert set(found.values()) == {0}, (out / "bare.log").read_text(encoding="utf-8")[-4000:]
    assert len(list(out.iterdir())) == 6
    rows = json.loads((out / "gpu-vllm.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows][:2] == ["TTFT of 64 tokens", "answers of 1 at once"]
    assert all(row["ratio"] > 0 for row in rows)


def test_what_the_table_says_would_prove_each_part_is_there(tmp_path: Path) -> None:
    table = [
        line for line in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    bounds = {stage.name: stage.limit_s for stage in stages(tmp_path, tmp_path, tmp_path)}
    stated = re.findall(rf"\b({'|'.join(sorted(bounds, key=len, reverse=True))}),? (\d+) s", "\n".join(table))
    assert {name: float(seconds) for name, seconds in stated} == {
        name: limit_s for name, limit_s in bounds.items() if name not in ("install", "device")
    }
    for file, word in re.findall(r"`(tests/gpu/\w+\.py) -k (\w+)`", "\n".join(table)):
        assert word in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no test of {word}"
    assert all(line.count(" | ") == 3 for line in table), "each row says what would prove it"
