"""Structures to grammars that workers can compile: made and checked in the helper process, once each.

A grammar that crashes the helper, or exceeds its bounds, is refused as the client's mistake, and no worker sees it.
Verdicts, refusals included, are cached by hash.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from services.gateway.errors import InvalidRequest, Unavailable
from services.gateway.generation.structured import Structure
from tandem.containment import Bounds, CallDied, CallExhausted, Sandbox, SandboxBusy
from tandem.grammar import STACK_BYTES, InvalidGrammar, grammar_of

MAX_LENGTH = 256 * 1024  # characters of a schema or grammar
MAX_KEPT = 16 * 2**20  # characters of grammars
BOUNDS = Bounds(cpu_s=2.0, stack_bytes=STACK_BYTES)
# Signals that the grammar may have caused. Others come from the machine or its operator.
GUILTY = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grammar, or what is wrong with the structure and where."""

    grammar: str
    problem: str = ""
    place: str = ""

    @property
    def size(self) -> int:
        return len(self.grammar) + len(self.problem) + len(self.place) + 256


class CheckedGrammars:
    """Makes grammars in a sandbox; with None, as in a simulation, on the event loop."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._size = 0
        self._asked: dict[bytes, asyncio.Event] = {}

    async def grammar_for(self, structure: Structure | None, caller: str) -> str:
        """Returns the checked grammar; "" for no structure.

        `caller`: the tenant, who takes turns in the helper process.

        Raises:
            InvalidRequest: naming the place.
            Unavailable: the helper process is too busy, or died.
        """
        if structure is None:
            return ""
        param = structure.param
        if _is_longer(structure.value, MAX_LENGTH):
            raise InvalidRequest(f"{param} must have at most {MAX_LENGTH} characters", param)
        verdict = await self._verdict(structure, caller)
        if verdict.problem:
            place = f"{param}{verdict.place}"
            raise InvalidRequest(f"{place}: {verdict.problem}", place)
        return verdict.grammar

    async def _verdict(self, structure: Structure, caller: str) -> Verdict:
        """Returns the verdict on a structure; concurrent requests for the same one share one call."""
        key = blake2b(pickle.dumps((structure.kind, structure.value, structure.behind)), digest_size=16).digest()
        while key not in self._kept:
            if (asked := self._asked.get(key)) is not None:
                await asked.wait()
                continue
            asked = self._asked[key] = asyncio.Event()
            try:
                self._keep(key, await self._ask(structure, caller))
            finally:
                del self._asked[key]
                asked.set()
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _ask(self, structure: Structure, caller: str) -> Verdict:
        said = structure.kind, structure.value, structure.behind
        try:
            if self._sandbox is None:
                return Verdict(grammar_of(*said))
            return Verdict(await self._sandbox.call(grammar_of, *said, caller=caller, bounds=BOUNDS))
        except InvalidGrammar as error:
            return Verdict("", error.problem, error.place)
        except CallExhausted as error:
            return Verdict("", f"needs more {error.what} to be compiled than a grammar may")
        except CallDied as error:
            if error.how not in GUILTY:
                raise Unavailable("the process that checks grammars was lost", code="helper_lost") from None
            return Verdict("", f"cannot be compiled: that ends in {error.how}")
        except SandboxBusy as error:
            raise Unavailable(str(error), code="helper_busy") from None

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        self._kept[key] = verdict
        self._size += verdict.size
        while self._size > MAX_KEPT and len(self._kept) > 1:
            self._size -= self._kept.popitem(last=False)[1].size


def _is_longer(value: Any, most: int) -> bool:
    """True if the value's JSON would certainly be longer.

    Nothing is serialized, so that megabytes delay no other request.
    """
    length, waiting = 0, [value]
    while waiting and length <= most:
        part = waiting.pop()
        length += len(part) if isinstance(part, str) else 1
        if isinstance(part, dict):
            length += sum(map(len, part))
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return length > most
