"""How often a step of the protocol had to wait for something, or a sequence was moved aside for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from services.decode.block_queue import BlockQueue
from services.decode.sequences import DecodeSequences
from services.gateway.admission import Admission
from services.gateway.generation.recovery.migration import Migration
from services.gateway.workers.stream import WorkerStream
from tandem.engine.kv.swap import SwapSpace
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.worker.kv.fetching import KVFetcher
from tandem.worker.kv.link_keeper import LinkKeeper


def _goes_on_waiting(queue: BlockQueue, _: object) -> bool:
    """Somebody whom the pool had no room for."""
    return any(waiting.may_fit and not waiting.answered for waiting in queue._line)


def _always(*_: object) -> bool:
    return True


# What is waited for: the method whose call shows it, and whether this call does.
WAITS: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "a turn": (Admission, "_until", _always),
    "blocks": (BlockQueue, "_reserve_in_order", _goes_on_waiting),
    "a link": (LinkKeeper, "_opening_link", _always),
    "a stream": (WorkerStream, "wait_open", lambda stream, _: not stream.open.is_set()),
    "a fence": (DecodeSequences, "_fence", _always),
    "KV of another cache": (KVFetcher, "_landed", _always),
    "another worker": (Migration, "lost", _always),
    "any worker": (Migration, "pause", lambda migration, *_: migration.first_loss is not None),
    "a preempted one's seat": (Scheduler, "_preempt", _always),
    "host memory": (SwapSpace, "copy", lambda _, copies, of_windows: bool(copies)),
}


# A request has to come between a worker's registration and its stream: some hundred schedules may do without.
RARE = {"a stream"}


@contextmanager
def counted(waits: Counter[str]) -> Iterator[None]:
    """In every process that runs inside this one."""
    with ExitStack() as stack:
        for name, (owner, method, happens) in WAITS.items():
            stack.enter_context(patch.object(owner, method, _counting(getattr(owner, method), waits, name, happens)))
        yield


def _counting(
    method: Callable[..., Any], waits: Counter[str], name: str, happens: Callable[..., bool]
) -> Callable[..., Any]:
    def counting(self: Any, *arguments: Any) -> Any:
        waits[name] += happens(self, *arguments)
        return method(self, *arguments)

    return counting
