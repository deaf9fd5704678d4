"""The page of an engine that has died: written by a process that dies, read by this one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.containment.crash_page import COMPUTING, NOBODY, NUM_SLOTS, SUSPECT, CrashPage, cause_of, death_of

BEGIN = """
import os, signal, sys
from pathlib import Path
from tandem.containment.crash_page import COMPILING, COMPUTING, SUSPECT, CrashPage
page = CrashPage.at(Path(sys.argv[1]))
page.begin("an incarnation")
one, two, suspect = page.enter("one", 0), page.enter("two", 5), page.enter("three", 7, SUSPECT)
page.stepping(); page.stepped()
"""
DIE = "\nos.kill(os.getpid(), signal.SIGSEGV)\n"


def named(folder: Path, code: str) -> dict[str, int]:
    path = folder / "run" / "page"
    ended = subprocess.run([sys.executable, "-c", BEGIN + code + DIE, str(path)], check=False, timeout=60)
    death = death_of(path.read_bytes(), cause_of(ended.returncode))
    assert death is not None
    assert (death.incarnation, death.cause) == ("an incarnation", "SIGSEGV")
    return dict(death.named)


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("", {}),
        ("page.stepping()", {"one": 1, "two": 6}),
        ("page.leave(one); page.stepping()", {"two": 6}),
        ("page.stepping(); page.moved(two, 9); page.stepped(); page.stepping()", {"one": 2, "two": 9}),
        ("page.stepping_alone(suspect, 8)", {"three": 8}),
        ("page.stepping_alone(suspect, 8); page.stepped(); page.stepping()", {"one": 1, "two": 6}),
        ("page.acquit(suspect, 8); page.stepping()", {"one": 1, "two": 6, "three": 8}),
        ("page.stepping(); page.masking(two)", {"two": 6}),
        ("page.stepping(); page.masking(two); page.masked()", {"one": 1, "two": 6}),
        ("page.stepping_alone(suspect, 8); page.masking(suspect); page.masked()", {"three": 8}),
        ("page.enter('four', 0, COMPILING)", {"four": 0}),
        ("\nwith page.compiling('four'): pass\n", {}),
    ],
)
def test_who_is_computed_is_named(tmp_path: Path, code: str, found: dict[str, int]) -> None:
    assert named(tmp_path, code) == found


def test_a_kill_names_nobody() -> None:
    page = CrashPage()
    page.begin("one")
    page.enter("a", 0)
    page.stepping()
    killed = death_of(page.read(), cause_of(-signal.SIGKILL))
    assert killed is not None
    assert not killed.named
    crashed = death_of(page.read(), "OOM")
    assert crashed is not None
    assert crashed.named == {"a": 0}


def test_what_is_no_page_is_none(tmp_path: Path) -> None:
    assert death_of(b"", "SIGSEGV") is None
    assert death_of(CrashPage().read(), "SIGSEGV") is None
    assert death_of(CrashPage().read()[:-1], "SIGSEGV") is None


def test_more_than_it_has_room_for_are_not_named() -> None:
    page = CrashPage()
    page.begin("one")
    slots = [page.enter(f"{i}", 0, COMPUTING if i % 2 else SUSPECT) for i in range(NUM_SLOTS + 1)]
    assert slots[-1] == NOBODY
    assert len(set(slots)) == NUM_SLOTS + 1
    page.moved(NOBODY, 1)
    page.acquit(NOBODY, 1)
    for slot in slots:
        page.leave(slot)
    assert page.enter("x" * 500, 0) != NOBODY


def test_causes() -> None:
    assert [cause_of(-number) for number in (6, 7, 11)] == ["SIGABRT", "SIGBUS", "SIGSEGV"]
    assert cause_of(0) == cause_of(1) == cause_of(-1000) == ""
