"""An engine's work in progress, in memory that outlives its process: a mapped file, read by the launcher or next start.

    header   the worker's incarnation; a count of steps; whether a step runs, and the slot that is alone in it; how many
             processes the kernel had OOM-killed when the worker last looked
    slots    each computed sequence, from its first step until it leaves; each sequence whose grammar is being compiled

Only changes are written, so that a step costs the same however many sequences are in it. A slot has the number of
tokens of the sequence's answer at the beginning of a step, and that step's number: as each step adds one token, the
present length follows. If a step adds another number of tokens, the slot is written again.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

MAGIC = b"tandem-crash-1\0\0"
HEADER_BYTES = 128
INCARNATION = struct.Struct("64s")
INCARNATION_AT = 16
STEP = struct.Struct("<qii")  # the number of steps so far, the step's phase, the slot that is alone in it
STEP_AT = 80
OOM_KILLS = struct.Struct("<q")
OOM_KILLS_AT = 96
# A slot's kind, tokens of the answer at the beginning of a step, the number of that step, the choice's id.
SLOT = struct.Struct("<iiq112s")
NUM_SLOTS = 1024
SIZE = HEADER_BYTES + NUM_SLOTS * SLOT.size
IDLE, STEPPING, MASKING = range(3)
FREE, COMPUTING, SUSPECT, COMPILING = range(4)
NOBODY = -1
# The cause if a step raised an exception: sequences whose grammars are being compiled are then no suspects.
RAISED = "RAISED"
# Causes for which the computed sequences are suspects. OOM: killed by the kernel for lack of memory.
CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "OOM", RAISED})


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker's process.

    `named`: the choices that were being computed, with their answers' lengths in tokens.

    `cause`: a signal's name, OOM, RAISED, or empty if unknown.
    """

    incarnation: str
    cause: str = ""
    named: Mapping[str, int] = field(default_factory=dict)


class CrashPage:
    """The page of one engine. The engine's thread writes it, and threads that compile write their own slots.

    A slot is a number; NOBODY if none is free: then the sequence is not named.
    """

    def __init__(self, page: mmap.mmap | bytearray | None = None) -> None:
        self._page = bytearray(SIZE) if page is None else page
        self._free = list(reversed(range(NUM_SLOTS)))
        self._num_steps, self._alone = 0, NOBODY

    @classmethod
    def at(cls, path: Path) -> CrashPage:
        """Makes a new page at `path`, in place of the last start's.

        Raises:
            OSError: the file cannot be made.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, SIZE)  # a full disk fails here, not by SIGBUS in a step
            return cls(mmap.mmap(file, SIZE))
        finally:
            os.close(file)

    def begin(self, incarnation: str) -> None:
        """Marks the page as this incarnation's."""
        self._page[: len(MAGIC)] = MAGIC
        INCARNATION.pack_into(self._page, INCARNATION_AT, incarnation.encode())

    def note_oom_kills(self, count: int) -> None:
        """Notes the number of OOM kills so far. If it is higher at the next start, this process was OOM-killed."""
        OOM_KILLS.pack_into(self._page, OOM_KILLS_AT, count)

    def read(self) -> bytes:
        """Returns the page's content, as the next start would find it."""
        return bytes(self._page)

    # --- who ---

    def enter(self, choice_id: str, num_tokens: int, kind: int = COMPUTING) -> int:
        """Enters a choice that is in every step from now on (a suspect: in steps of its own). Returns its slot."""
        try:
            slot = self._free.pop()
        except IndexError:
            return NOBODY
        whose = choice_id.encode()[:112]
        SLOT.pack_into(self._page, self._place(slot), kind, num_tokens, self._num_steps + 1, whose)
        return slot

    def moved(self, slot: int, num_tokens: int) -> None:
        """Notes that the running step brings a choice to `num_tokens`, by more or fewer than one token."""
        if slot != NOBODY:
            struct.pack_into("<iq", self._page, self._place(slot) + 4, num_tokens, self._num_steps + 1)

    def acquit(self, slot: int, num_tokens: int) -> None:
        """Turns a suspect into an ordinary choice."""
        if slot != NOBODY:
            struct.pack_into("<iiq", self._page, self._place(slot), COMPUTING, num_tokens, self._num_steps + 1)

    def leave(self, slot: int) -> None:
        if slot != NOBODY:
            struct.pack_into("<i", self._page, self._place(slot), FREE)
            self._free.append(slot)

    @contextmanager
    def compiling(self, choice_id: str) -> Iterator[None]:
        """Enters a choice while its grammar is compiled in the block, on any thread."""
        slot = self.enter(choice_id, 0, COMPILING)
        try:
            yield
        finally:
            self.leave(slot)

    # --- what ---

    def stepping(self) -> None:
        """Notes the beginning of a step of all choices but suspects."""
        self._num_steps += 1
        self._alone = NOBODY
        STEP.pack_into(self._page, STEP_AT, self._num_steps, STEPPING, NOBODY)

    def stepping_alone(self, slot: int, num_tokens: int) -> None:
        """Notes the beginning of a step of one choice alone, which does not count for others."""
        if slot != NOBODY:
            struct.pack_into("<iq", self._page, self._place(slot) + 4, num_tokens, self._num_steps)
        self._alone = slot
        STEP.pack_into(self._page, STEP_AT, self._num_steps, STEPPING, slot)

    def masking(self, slot: int) -> None:
        """Notes, within a step, that the mask of one choice's grammar is being computed."""
        struct.pack_into("<ii", self._page, STEP_AT + 8, MASKING, slot)

    def masked(self) -> None:
        struct.pack_into("<ii", self._page, STEP_AT + 8, STEPPING, self._alone)

    def stepped(self) -> None:
        struct.pack_into("<i", self._page, STEP_AT + 8, IDLE)

    def _place(self, slot: int) -> int:
        return HEADER_BYTES + slot * SLOT.size


def page_path(folder: Path, namespace: str, worker_id: str) -> Path:
    """Returns the path of a worker's page, the same at each start."""
    return folder / quote(f"{namespace} {worker_id}.page", safe=" ")


def death_of(page: bytes, cause: str) -> Death | None:
    """Returns the death that a page records; None if it is no page. Only a cause in CRASHES names choices."""
    if len(page) != SIZE or not page.startswith(MAGIC):
        return None
    incarnation = _text(*INCARNATION.unpack_from(page, INCARNATION_AT))
    return Death(incarnation, cause, _named(page, cause) if cause in CRASHES else {})


def oom_kills_in(page: bytes) -> int | None:
    """Returns the last noted count of OOM kills; None if it is no page."""
    return int(OOM_KILLS.unpack_from(page, OOM_KILLS_AT)[0]) if len(page) == SIZE and page.startswith(MAGIC) else None


def cause_of(status: int) -> str:
    """Returns the name of the signal that ended a process with subprocess's `status`; empty if none did."""
    return signal.Signals(-status).name if -status in set(signal.Signals) else ""


def _named(page: bytes, cause: str) -> dict[str, int]:
    num_steps, phase, alone = STEP.unpack_from(page, STEP_AT)
    named = {}
    for slot, (kind, num_tokens, since, whose) in enumerate(SLOT.iter_unpack(page[HEADER_BYTES:])):
        computed = slot == alone if alone != NOBODY else kind == COMPUTING
        compiled = kind == COMPILING and cause != RAISED
        if compiled or (kind != FREE and phase != IDLE and computed):
            named[_text(whose)] = num_tokens + max(0, num_steps - since)
    return named


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
