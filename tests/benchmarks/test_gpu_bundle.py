"""The bundle for a machine without network fits its parts; what is run there says what it found, whatever fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import options_of
from benchmarks.gpu.bare import HERE, PYTHON, Errand, environment_of, is_fine, run, stages, unpack, vllm_of
from benchmarks.gpu.bundle import ROOT, cut, lacks, pack, requirements
from benchmarks.gpu.wheels import TANDEM, THERE, VLLM, Site
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
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = requirements(TANDEM, constraints)
    assert "grpcio==" in " ".join(found)
    assert requirements(VLLM, constraints) == list(VLLM.wheels), "each has its version"
    for site in (TANDEM, VLLM):
        carried = {name.partition("==")[0] for name in site.wheels}
        assert not carried & {"torch", "cupy-cuda13x", "numpy", "triton"}, "the machine has these"
        assert not carried & site.not_needed
        assert not THERE & site.not_needed
    with pytest.raises(ValueError, match="no version of annotated-doc"):
        requirements(TANDEM, "grpcio==1.0")


def test_what_is_carried_needs_nothing_that_is_not_there(tmp_path: Path) -> None:
    needed = (
        "Typing_Extensions>=4; python_version < '3.13'",
        "tomli; python_version < '3.11'",
        "b; extra == 'aws'",
        "click",
        "cuda-tile",
        "zope.interface",
    )
    for name, texts in (("x", needed), ("Granian", ("absent-here",))):
        lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {text}" for text in texts)]
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    site = Site("site", ("x", "granian"), frozenset({"cuda-tile"}))
    assert lacks(site, tmp_path) == {"zope-interface", "absent-here"}


def test_parts_are_put_together_where_they_are_unpacked_and_only_once(tmp_path: Path) -> None:
    folder, there = tmp_path / "folder", tmp_path / "there" / "tandem"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "program").write_bytes(os.urandom(250_000))
    (folder / "bin" / "program").chmod(0o755)
    parts = cut(pack(folder, tmp_path / "tandem.tar.xz"), 100_000)
    assert [part.name for part in parts] == [f"tandem.tar.xz.{number}-of-3" for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        (tmp_path / f"carried{number}").mkdir()
        part.rename(tmp_path / f"carried{number}" / part.name)
    there.mkdir(parents=True)
    (there / "stale.py").touch()
    for _ in range(2):
        unpack(tmp_path, there)
    assert {path.name for path in there.iterdir()} == {"bin", "unpacked"}
    assert (there / "bin" / "program").read_bytes() == (folder / "bin" / "program").read_bytes()
    assert os.access(there / "bin" / "program", os.X_OK)
    (tmp_path / "carried1" / parts[1].name).unlink()
    with pytest.raises(SystemExit, match=r"tandem\.tar\.xz: .* lacks part 2 of 3"):
        unpack(tmp_path, there)
    (tmp_path / "tandem.tar.xz.1-of-2").touch()
    with pytest.raises(SystemExit, match=r"tandem\.tar\.xz: .* has parts of two, of"):
        unpack(tmp_path, there)
    with pytest.raises(SystemExit, match=r"vllm\.tar\.xz: .* lacks part 1 of 1"):
        unpack(tmp_path, tmp_path / "vllm")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_stages_command_is_one_that_its_program_takes(tmp_path: Path, device: str) -> None:
    (tmp_path / "vllm.tar.xz.1-of-2").touch()
    todo = {stage.name: stage.command for stage in stages(tmp_path, tmp_path / "site", tmp_path, device)}
    tests, measured = ["transports", "engine", "flashinfer", "cluster"], ["engine", "transfer", "serving", "vllm"]
    expected = ["install", "device", *tests, *(f"gpu-{part}" for part in measured)]
    assert list(todo) == [*expected[:-1], "unpack-vllm", expected[-1]], "smallest first"
    assert options_of(todo["device"][3:]).only == ""
    for name in ("transports", "engine", "flashinfer"):
        files = [ROOT / argument for argument in todo[name] if argument.startswith("tests/")]
        tests_there = re.findall(r"^(?:async )?def test_\w+", "\n".join(map(Path.read_text, files)), re.M)
        assert len(tests_there) >= len(files) > 0
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
    env = environment_of(tmp_path, "cuda")
    statuses = [subprocess.run(said, cwd=tmp_path, env=env, timeout=60).returncode for said in (there, here)]
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
    assert found["never"] == "not begun: needed failed"
    assert run(todo[:1], tmp_path, os.environ, 0) == {"fine": "not begun: no time is left"}
    written = [json.loads(line) for line in (tmp_path / "bare.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [result["stage"] for result in written] == [*(stage.name for stage in todo), "fine"]
    assert [result["status"] for result in written[:-1]] == list(found.values())
    for result, text in zip(written, ("figure 7", "broken", "tidied"), strict=False):
        assert text in result["tail"]
    assert "broken" not in written[2]["tail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_cannot_run_here_is_named_and_is_no_failure(tmp_path: Path) -> None:
    """Tests that skip, alone and beside one that fails; a stage whose need is not here; and those behind it."""
    todo = {stage.name: stage for stage in stages(tmp_path, tmp_path, tmp_path)}
    skips = "import pytest\ndef test_skips():\n pytest.skip()\ndef test_fails():\n assert False"
    (tmp_path / "test_one.py").write_text(skips, encoding="utf-8")
    mixed = [*todo["transports"].command[:-1], str(tmp_path / "test_one.py")]
    asked = [todo["transports"], Errand("mixed", mixed, 120), todo["device"], todo["engine"]]
    found = run(asked, tmp_path / "out", environment_of(tmp_path, "cuda"), 600)
    no_device = f"cannot run here: torch {torch.__version__} sees no CUDA device; docs/gpu.md says what ran where"
    assert found == {
        "transports": "cannot run here: no CUDA device: torch.cuda.is_available() is false",
        "mixed": pytest.ExitCode.TESTS_FAILED, "device": no_device, "engine": no_device,
    }  # fmt: skip
    assert [is_fine(status) for status in found.values()] == [True, False, True, True]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_of_it_runs_here_at_a_small_scale(tmp_path: Path) -> None:
    """Its tests skip, saying so; the cluster, every part of the benchmark and a peer are real processes."""
    site, out, bundle = tmp_path / "tandem", tmp_path / "out", tmp_path / "bundle"
    program = tmp_path / "carried" / "vllm" / "entrypoints" / "cli" / "main.py"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN, encoding="utf-8")
    bundle.mkdir()
    (tmp_path / "nothing").mkdir()
    for name, folder in (("tandem", "nothing"), ("vllm", "carried")):
        cut(pack(tmp_path / folder, bundle / f"{name}.tar.xz"), 1 << 20)
    unpack(bundle, vllm_of(site))  # here by another Python than the bundle's
    ports = zip(("TANDEM_HTTP_PORT", "TANDEM_GRPC_PORT", "TANDEM_REDIS_PORT"), map(str, free_ports(3)), strict=True)
    environment, found = environment_of(site, "cpu") | {"TMPDIR": str(tmp_path)}, dict[str, int | str]()
    for stage in stages(bundle, site, out, "cpu"):
        found |= run([stage], out, environment | (dict(ports) if stage.name == "cluster" else {}), 900)
    no_device = "cannot run here: no CUDA device: torch.cuda.is_available() is false"
    other = 0 if HERE == PYTHON else f"cannot run here: the bundle's wheels are for Python {PYTHON}, and this is {HERE}"
    assert {name: status for name, status in found.items() if status != 0} == dict.fromkeys(
        ("transports", "engine", "flashinfer"), no_device
    ) | (dict.fromkeys(("install", "unpack-vllm"), other) if other else {}), (out / "bare.log").read_text("utf-8")[
        -4000:
    ]
    assert len(list(out.iterdir())) == 6
    rows = json.loads((out / "gpu-vllm.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows][:2] == ["TTFT of 64 tokens", "answers of 1 at once"]
    assert all(row["ratio"] > 0 for row in rows)


# What a file says where only a GPU takes it.
OF_A_DEVICE = re.compile(r"torch\.cuda|is_cuda|pin_memory|on_host|_scaled_mm|cupy")


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
    for line in table[2:]:
        *_, run, proof = line.strip("| ").split(" | ")
        assert run == proof == "n/a" or re.search(r"\d+ s\b", proof), f"what would prove it, and how long? {line}"
    files = [path for folder in ("tandem", "services") for path in (ROOT / folder).rglob("*.py")]
    of_a_device = {str(path.relative_to(ROOT)) for path in files if OF_A_DEVICE.search(path.read_text("utf-8"))}
    assert {file for file in of_a_device if f"`{file}`" not in "\n".join(table)} == set(), "no row names it"
