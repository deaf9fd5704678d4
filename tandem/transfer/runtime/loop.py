"""A driver without threads: one event loop steps every end of every link.

    common = {"network": network, "transports": ("memory",), "driver": LoopDriver(loop), "nonce": random.Random(7).…}
    receiver = Receiver(LocalPeer(decode), cache, host="d", transports=("memory",), runtime=runtime)
    sender = Sender(LocalPeer(prefill), transports=("memory",), runtime=runtime)
    link = await asyncio.wrap_future(sender.open_link(decode, receiver.address, timeout_s=1.5))
    await asyncio.wrap_future(receiver.cancel(transfer_id))

The network's streams and listeners need `watch`, as MemoryNetwork's have. The driver takes its time from the loop,
which may have virtual time; the same nonces, network and calls give the same steps in the same order. No call can wait
here: `Push.push` raises RESOURCE_EXHAUSTED if a link's memory (`arena_bytes`) and its stream are full.
"""

from __future__ import annotations

import asyncio
import threading

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.runtime.driver import Task


class LoopDriver:
    concurrent = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = loop.time

    def start(self, task: Task) -> LoopTask:
        return LoopTask(self._loop, task)

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        raise TransferError("RESOURCE_EXHAUSTED", "the link's memory is full, and an event loop cannot wait for room")


class LoopTask:
    alive = True

    def __init__(self, loop: asyncio.AbstractEventLoop, task: Task) -> None:
        self._loop, self._task = loop, task
        self._watched = self._again = False
        self._due = loop.call_soon(self._step)

    def join(self) -> None:
        while self.alive:
            self._step()

    def _step(self) -> None:
        self._again = False
        pause = self._task.step()
        self._due.cancel()
        if pause is None:
            self.alive = False
            return
        if not self._watched:
            self._watched = True
            self._task.watch(self._ready)
        soon = not self._task.idle() or self._again
        self._due = self._loop.call_later(0.0 if soon else pause, self._step)

    def _ready(self) -> None:
        self._again = True
        if self.alive and not self._loop.is_closed():
            self._due.cancel()
            self._due = self._loop.call_soon(self._step)
