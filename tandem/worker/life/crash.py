"""A worker's crash page at its start: the page that the last process left is reported, then a new one begins.

A launcher that saw the last process end has already reported its page. Elsewhere, as in a pod, the fault handler's text
beside the page names the signal. A killed process left no text: if the kernel's count of OOM kills has risen since the
process last looked, it was OOM-killed; else no suspect is named.
"""

from __future__ import annotations

import asyncio
import faulthandler
import re
from pathlib import Path

import structlog

from tandem.containment import CrashPage, oom_kills_here, oom_kills_in, page_path
from tandem.registry import report_page
from tandem.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)
CAUSES = {
    "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE", "Floating-point exception": "SIGFPE",
}  # fmt: skip
LAST_CHARACTERS = 4000


def open_crash_page(settings: WorkerSettings, worker_id: str) -> CrashPage:
    """Opens the crash page of a starting process, and reports the last process's death. To be called first of all."""
    path = page_path(settings.crash_dir, settings.namespace, worker_id)
    faults = path.with_suffix(".fault")
    said = faults.read_text(errors="replace", encoding="utf-8") if faults.exists() else ""
    if said:
        log.error("the last start has crashed", said=said[-LAST_CHARACTERS:])
    of = {"crash_dir": settings.crash_dir, "worker_id": worker_id}
    cause = cause_in(said) or _killed_for_memory(path)
    asyncio.run(report_page({**of, "redis_url": settings.redis_url, "namespace": settings.namespace}, cause))
    return _new_page(path, faults)


def _killed_for_memory(path: Path) -> str:
    noted = oom_kills_in(path.read_bytes()) if path.exists() else None
    return "OOM" if noted is not None and oom_kills_here() > noted else ""


def cause_in(said: str) -> str:
    """Returns the signal that a fault handler's text names; empty if it names none."""
    found = re.findall(r"Fatal Python error: (.*)", said)
    return CAUSES.get(found[-1].strip(), "") if found else ""


def _new_page(path: Path, faults: Path) -> CrashPage:
    try:
        page = CrashPage.at(path)
        page.note_oom_kills(oom_kills_here())
        faulthandler.enable(faults.open("w", encoding="utf-8"))
    except OSError as error:
        log.warning("no crash page: a request that ends this worker will not be known", path=str(path), why=str(error))
        return CrashPage()
    return page
