"""pytest's `-p benchmarks.gpu.skipped`: where every test was skipped, the exit status is CANNOT, the last line why."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.bare import CANNOT


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    stats: dict[str, list[Any]] = reporter.stats if reporter else {}  # processes of xdist have none
    skipped = stats.get("skipped", [])
    if not skipped or any(stats.get(outcome) for outcome in ("passed", "failed", "error")):
        return
    session.exitstatus = CANNOT
    _, _, reason = skipped[0].longrepr
    session.config.add_cleanup(lambda: print(reason.removeprefix("Skipped: ")))
