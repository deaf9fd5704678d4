"""An engine's work in progress, in memory that outlives it: a file, which the launcher or next start reads.

    header   the worker's incarnation; a count of steps; whether a step is under way, and who is alone in it; how many
             processes the kernel had killed for want of memory when the worker last looked
    slots    who computes: from the first step that a sequence is in until it leaves; whose grammar is being compiled

Only what changes is written, so that a step costs the same however many sequences are in it. A slot says how many
tokens of its answer there were at the beginning of which step; as each step brings one, that tells where it is now.
Where a step brings another number, it is written again.
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
STEP = struct.Struct("<qii")  # how many there have been, its phase, the slot that is alone in it
STEP_AT = 80
OOM_KILLS = struct.Struct("<q")
OOM_KILLS_AT = 96
# Its kind, tokens of its answer at the beginning of a step, the number of that step, whose it is.
SLOT = struct.Struct("<iiq112s")
NUM_SLOTS = 1024
SIZE = HEADER_BYTES + NUM_SLOTS * SLOT.size
IDLE, STEPPING, MASKING = range(3)
FREE, COMPUTING, SUSPECT, COMPILING = range(4)
NOBODY = -1
# A step raised an exception: sequences whose grammars are compiled beside it have no part in that.
RAISED = "RAISED"
# Ends that say something of what was being computed. OOM: the kernel, for want of memory.
CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "OOM", RAISED})


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker's process ended, and who was being computed: choice id to tokens of its answer at that time.

    `cause`: a signal's name, OOM, RAISED, or empty where nobody knows.
    """

    incarnation: str
    cause: str = ""
    named: Mapping[str, int] = field(default_factory=dict)


class CrashPage:
    """One engine's. The engine's thread writes it, and threads that compile write slots of their own.

    A slot is a number, NOBODY where none is free: who has none is not named.
    """

    def __init__(self, page: mmap.mmap | bytearray | None = None) -> None:
        self._page = bytearray(SIZE) if page is None else page
        self._free = list(reversed(range(NUM_SLOTS)))
        self._num_steps, self._alone = 0, NOBODY

    @classmethod
    def at(cls, path: Path) -> CrashPage:
        """A new page at `path`, where the last start's is no longer needed.

        Raises:
            OSError
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, SIZE)  # a full disk is found out now, not by SIGBUS in a step
            return cls(mmap.mmap(file, SIZE))
        finally:
            os.close(file)

    def begin(self, incarnation: str) -> None:
        """It is this worker's from now on."""
        self._page[: len(MAGIC)] = MAGIC
        INCARNATION.pack_into(self._page, INCARNATION_AT, incarnation.encode())

    def note_oom_kills(self, count: int) -> None:
        """So many there have been by now. If there are more at the next start, this one's end was among them."""
        OOM_KILLS.pack_into(self._page, OOM_KILLS_AT, count)

    def read(self) -> bytes:
        """As it would be found."""
        return bytes(self._page)

    # --- who ---

    def enter(self, choice_id: str, num_tokens: int, kind: int = COMPUTING) -> int:
        """From now on it is in every step (a suspect: in those where it is alone); its answer has so many tokens."""
        try:
            slot = self._free.pop()
        except IndexError:
            return NOBODY
        whose = choice_id.encode()[:112]
        SLOT.pack_into(self._page, self._place(slot), kind, num_tokens, self._num_steps + 1, whose)
        return slot

    def moved(self, slot: int, num_tokens: int) -> None:
        """The step under way has brought it to so many tokens, other than by one."""
        if slot != NOBODY:
            struct.pack_into("<iq", self._page, self._place(slot) + 4, num_tokens, self._num_steps + 1)

    def acquit(self, slot: int, num_tokens: int) -> None:
        """It is a suspect no longer."""
        if slot != NOBODY:
            struct.pack_into("<iiq", self._page, self._place(slot), COMPUTING, num_tokens, self._num_steps + 1)

    def leave(self, slot: int) -> None:
        if slot != NOBODY:
            struct.pack_into("<i", self._page, self._place(slot), FREE)
            self._free.append(slot)

    @contextmanager
    def compiling(self, choice_id: str) -> Iterator[None]:
        """Around the compilation of its grammar, on any thread."""
        slot = self.enter(choice_id, 0, COMPILING)
        try:
            yield
        finally:
            self.leave(slot)

    # --- what ---

    def stepping(self) -> None:
        """A step begins, for all but suspects."""
        self._num_steps += 1
        self._alone = NOBODY
        STEP.pack_into(self._page, STEP_AT, self._num_steps, STEPPING, NOBODY)

    def stepping_alone(self, slot: int, num_tokens: int) -> None:
        """A step of one begins: for others it counts as none."""
        if slot != NOBODY:
            struct.pack_into("<iq", self._page, self._place(slot) + 4, num_tokens, self._num_steps)
        self._alone = slot
        STEP.pack_into(self._page, STEP_AT, self._num_steps, STEPPING, slot)

    def masking(self, slot: int) -> None:
        """Within a step: the tokens that one sequence's grammar allows are looked for."""
        struct.pack_into("<ii", self._page, STEP_AT + 8, MASKING, slot)

    def masked(self) -> None:
        struct.pack_into("<ii", self._page, STEP_AT + 8, STEPPING, self._alone)

    def stepped(self) -> None:
        struct.pack_into("<i", self._page, STEP_AT + 8, IDLE)

    def _place(self, slot: int) -> int:
        return HEADER_BYTES + slot * SLOT.size


def page_path(folder: Path, namespace: str, worker_id: str) -> Path:
    """The file that each start of one worker uses."""
    return folder / quote(f"{namespace} {worker_id}.page", safe=" ")


def death_of(page: bytes, cause: str) -> Death | None:
    """The death of the worker whose page was found; None where it is none. A cause that tells nothing names nobody."""
    if len(page) != SIZE or not page.startswith(MAGIC):
        return None
    incarnation = _text(*INCARNATION.unpack_from(page, INCARNATION_AT))
    return Death(incarnation, cause, _named(page, cause) if cause in CRASHES else {})


def oom_kills_in(page: bytes) -> int | None:
    """The last count that was noted; None where it is no page."""
    return int(OOM_KILLS.unpack_from(page, OOM_KILLS_AT)[0]) if len(page) == SIZE and page.startswith(MAGIC) else None


def cause_of(status: int) -> str:
    """The cause of a process's end with `status`, as subprocess has it."""
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
