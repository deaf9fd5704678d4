"""Engines that crash in mid-step, as by SIGSEGV; and reports of processes that died, by a launcher or not.

A prompt (POISON, 10 + n, id, …) crashes the worker, of either role, that computes token n of its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tandem.containment.crash_page import CrashPage, death_of
from tandem.registry import Registry, RegistryUnavailable
from tests.simulation.world import Process, World

POISON = 2  # a token that no other prompt begins with
TOLD_S = 0.02


class Crashed(BaseException):
    """The process has ended."""


class Crashes:
    """`registry_of` makes a client that belongs to a process. Without a launcher the next start tells of a death."""

    def __init__(self, world: World, registry_of: Callable[[Process], Registry], launched: bool) -> None:
        self.of_prompt: Counter[int] = Counter()  # by id
        self.crashed: Callable[[str], None] = lambda name: None
        self._world, self._registry_of, self._launched = world, registry_of, launched
        self._launcher = world.process("launcher")
        self._causes: dict[str, str] = {}
        self._pages: dict[str, tuple[CrashPage, str]] = {}  # not reported yet: with the cause of death

    def started(self, name: str) -> None:
        self._tell(name)

    def forget(self, name: str) -> None:
        """Nobody will tell of its last death."""
        self._pages.pop(name, None)

    def page_of(self, process: Process) -> CrashPage:
        """The page of a worker that begins."""
        page = CrashPage()
        process.watchers.append(lambda process: None if process.alive else self._died(process.name, page))
        return page

    def plant(self, engine: Any, process: Process) -> None:
        runner = engine._runner
        execute = runner.execute

        def crashing(batch: list[Any]) -> Any:
            for item in batch:
                tokens = item.seq.token_ids
                if tokens[0] == POISON and item.seq.num_output_tokens >= tokens[1] - 10:
                    self._crash(process, tokens[2])
            return execute(batch)

        runner.execute = crashing

    def _crash(self, process: Process, prompt: int) -> None:
        self.of_prompt[prompt] += 1
        self._world.log("crash", process.name, prompt)
        self._causes[process.name] = "SIGSEGV"
        process.kill()
        self.crashed(process.name)
        raise Crashed

    def _died(self, name: str, page: CrashPage) -> None:
        self._pages[name] = page, self._causes.pop(name, "SIGKILL")
        if self._launched:
            self._world.after(TOLD_S, self._tell, name)

    def _tell(self, name: str) -> None:
        if name in self._pages and not self._world.closing:
            page, cause = self._pages.pop(name)
            self._launcher.spawn(self._told(page.read(), cause))

    async def _told(self, page: bytes, cause: str) -> None:
        death = death_of(page, cause)
        registry = self._registry_of(self._launcher)
        if death is not None:
            with suppress(RegistryUnavailable):
                await registry.report_death(death)
        await registry.close()
