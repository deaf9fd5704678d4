"""Folders of users who have a home, and of those who have none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.machine import home
from tandem.machine.home import cache_folder, provide_home, state_folder
from tests.machines import AS_NAMELESS, UID, needs_root

SAID = """
import os
from getpass import getuser
from pathlib import Path
from tandem.machine.home import cache_folder, provide_home
folder = cache_folder("kernels")
provide_home()
folder.mkdir(parents=True)
print(Path.home(), getuser(), folder, cache_folder("kernels"))
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for what is temporary, in a process that has no folder of its own there yet."""
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    home._in_place_of_home.cache_clear()
    yield place
    home._in_place_of_home.cache_clear()


def test_a_home_has_cache_and_state_which_variables_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / ".cache" / "tandem" / "kernels"
    assert state_folder("running") == tmp_path / ".local" / "state" / "tandem" / "running"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/read-only")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert cache_folder("kernels") == Path("/proc/read-only/tandem/kernels")
    assert state_folder("running") == tmp_path / "state" / "tandem" / "running"


@needs_root
@pytest.mark.parametrize("given", ["", "/", "/nowhere/at/all", "/root"])
def test_a_nameless_user_has_a_folder_of_its_own_below_the_temporary_one(given: str, tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    names = [f"HOME={given}"] if given else []
    command = [*AS_NAMELESS, f"TMPDIR={place}", *names, sys.executable, "-c", SAID]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    own = place / f"tandem-{UID}"
    found, name, folder, again = done.stdout.split()
    assert (found, name) == ("/root" if given == "/root" else str(own), f"uid-{UID}")
    assert folder == again == str(own / ".cache" / "tandem" / "kernels")
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "writable"])
def test_a_place_that_others_could_write_to_is_not_taken(
    kind: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "_home", lambda: None)
    place = temporary / f"tandem-{os.getuid()}"
    if kind == "link":
        (temporary / "theirs").mkdir()
        place.symlink_to(temporary / "theirs")
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    own = cache_folder("kernels").parents[2]
    assert own.parent == temporary
    assert own.name.startswith("tandem-home-")
    assert cache_folder("models").parents[2] == own


def test_a_home_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    provide_home()
    assert (os.environ["HOME"], os.environ["USER"]) == (str(tmp_path), "somebody")
