"""The public proto against the last release's: what a client was built with goes on working."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.release import ROOT, released_files

BUF = Path(sys.executable).with_name("buf")
LLM = Path("protos/tandem/v1/llm.proto")


def breaking(now: str, folder: Path) -> str:
    """Faults that buf finds in `now`; empty where there are none."""
    released = released_files(folder, str(LLM))
    (folder / "now" / LLM).parent.mkdir(parents=True)
    (folder / "now" / LLM).write_text(now, encoding="utf-8")
    command = [BUF, "breaking", folder / "now" / "protos", "--against", released / "protos"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=folder, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout


def test_llm_proto_breaks_no_client_of_the_last_release(tmp_path: Path) -> None:
    assert breaking((ROOT / LLM).read_text(encoding="utf-8"), tmp_path) == ""


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("  uint32 prompt_tokens = 1;", "  uint64 prompt_tokens = 1;"),
        ("  uint32 prompt_tokens = 1;", ""),
        ("rpc ListModels(", "rpc Models("),
    ],
)
def test_a_break_would_be_seen(here: str, there: str, tmp_path: Path) -> None:
    now = (ROOT / LLM).read_text(encoding="utf-8")
    assert here in now
    assert breaking(now.replace(here, there), tmp_path) != ""
