"""The NCCL transport under random schedules: every thread, queue and link is a task, and a seed says which moves next.

Faults: messages dropped or damaged on the stream, payloads damaged, a queue that stops, a link closed, a transfer
cancelled or aborted, an initialisation that hangs. Rows are overwritten as soon as no push reads them any more.
Whatever happens: what commits is right, and what ended otherwise is never written again. SCHEDULES sets how many
are tried.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
import torch

from tandem.transfer import Link, LinkPeer, LinkRuntime, LocalPeer, MemoryNetwork, Push, Receiver, Sender, TransferError
from tandem.transfer.protocol.wire import HEADER_BYTES, Bytes, Kind, parse_header
from tandem.transfer.runtime.driver import Task
from tandem.transfer.transports import TRANSPORTS
from tandem.transfer.transports.base import ByteStream, Listener, Transport
from tandem.transfer.transports.nccl import NcclTransport
from tandem.transfer.transports.nccl_communicator import Communicators
from tests.transfer import fake_nccl
from tests.transfer.fake_nccl import FakeDevice, FakeNccl

SCHEDULES = int(os.environ.get("SCHEDULES", "60"))
TURNS, TURN_S, END_S = 400, 0.002, 10.0
LAYERS, BLOCKS = 2, 12
SENDER, RECEIVER = LinkPeer("p", "p-1", "layout"), LinkPeer("d", "d-1", "layout")


class LinkWorld:
    """The driver of every link's ends, the lanes of their transports, and time."""

    concurrent = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        self.steps: list[Callable[[], object]] = []

    def now(self) -> float:
        return self.time

    def start(self, task: Task) -> Stepped:
        stepped = Stepped(task)
        self.steps.append(stepped.step)
        return stepped

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        raise TransferError("RESOURCE_EXHAUSTED", "no room")

    def lane(self, _name: str) -> SteppedLane:
        lane = SteppedLane()
        self.steps.append(lane.step)
        return lane

    def turn(self) -> None:
        """A few moves, and time passes."""
        for _ in range(self.random.randrange(1, 8)):
            self.random.choice(self.steps)()
        self.time += TURN_S

    def run_out(self) -> None:
        """Everything moves until every deadline is over."""
        end = self.time + END_S
        while self.time < end:
            for step in list(self.steps):
                step()
            self.time += 0.1


class Stepped:
    def __init__(self, task: Task) -> None:
        self._task = task
        self.alive = True

    def step(self) -> None:
        self.alive = self.alive and self._task.step() is not None

    def join(self) -> None:
        while self.alive:
            self.step()


class SteppedLane:
    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def close(self) -> None:
        pass

    def step(self) -> None:
        if self._jobs:
            self._jobs.popleft()()


class FaultyNetwork(MemoryNetwork):
    def __init__(self, world: LinkWorld, chance: float) -> None:
        super().__init__()
        self._world, self._chance = world, chance

    def dial(self, address: str, timeout: float) -> ByteStream:
        return FaultyStream(super().dial(address, timeout), self._world.random, self._chance)

    def listen(self, host: str, port: int) -> Listener:
        return super().listen(host, port)


class FaultyStream:
    """Drops or damages whole messages of the sender, after its HELLO."""

    def __init__(self, stream: ByteStream, seeded: random.Random, chance: float) -> None:
        self._stream, self._random, self._chance = stream, seeded, chance
        self.recv_into, self.wait, self.wake, self.close = stream.recv_into, stream.wait, stream.wake, stream.close

    def send(self, parts: Iterable[Bytes]) -> int:
        data = b"".join(parts)
        sent, kept = len(data), bytearray()
        while data:
            message = parse_header(data)
            size = HEADER_BYTES + message.inline_bytes
            kept += self._spoiled(message.kind, data[:size])
            data = data[size:]
        assert self._stream.send([bytes(kept)]) == len(kept)
        return sent

    def _spoiled(self, kind: Kind, data: bytes) -> bytes:
        if kind in (Kind.HELLO, Kind.PING, Kind.PONG) or self._random.random() >= self._chance:
            return data
        if self._random.random() < 0.5:
            return b""
        damaged = bytearray(data)
        damaged[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


class LinkSchedule:
    """Three transfers between two ends, in whatever order the seed says."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world = LinkWorld(seed)
        self.random = world.random
        self.faults = self.random.random() < 0.7
        self.fakes: list[FakeNccl] = []
        monkeypatch.setitem(TRANSPORTS, "nccl", self._transport)
        network = FaultyNetwork(world, 0.03 if self.faults and self.random.random() < 0.5 else 0.0)
        self.source = [torch.randint(0, 255, (BLOCKS, 2, 8), dtype=torch.uint8) for _ in range(LAYERS)]
        self.cache = [torch.zeros(BLOCKS, 2, 8, dtype=torch.uint8) for _ in range(LAYERS)]
        runtime, nccl = LinkRuntime(network, world, lambda: self.random.getrandbits(63)), ("nccl",)
        self.sender = Sender(LocalPeer(SENDER), transports=nccl, runtime=runtime, arena_bytes=1024, frame_bytes=64)
        self.receiver = Receiver(LocalPeer(RECEIVER), self.cache, host="d", transports=nccl, runtime=runtime)
        self.blocks = self.random.sample(range(BLOCKS), BLOCKS)
        self.endings: dict[str, list[str]] = {name: [] for name in "abc"}
        self.marked: dict[str, list[torch.Tensor]] = {}
        self.sent = [rows.clone() for rows in self.source]
        self.leaving: dict[str, Push] = {}  # whose blocks are another's once they have been read

    def run(self) -> None:
        opening = self.sender.open_link(RECEIVER, self.receiver.address, timeout_s=3.0)
        pushes: dict[str, tuple[Push, list[tuple[int, int]]]] = {}
        waiting = list(self.endings)
        for name in waiting:
            self._expect(name)
        for _ in range(TURNS):
            self.world.turn()
            if opening.done() and not opening.exception():
                self._move(opening.result(), waiting, pushes)
            if self.faults and self.random.random() < 0.004:
                self._fault(pushes)
            self._overwrite()
        self.world.run_out()
        for name in self.endings:
            assert len(self.endings[name]) == 1, (name, self.endings[name])
            there = self._there(name)
            assert all(torch.equal(c[there], m) for c, m in zip(self.cache, self.marked[name], strict=True)), name
        if not self.faults:
            assert all(ended == ["commit"] for ended in self.endings.values()), self.endings

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for fake in self.fakes:
            fake.close()
        fake_nccl.damage_next.clear()

    def _overwrite(self) -> None:
        for name in [name for name, push in self.leaving.items() if not push.reading]:
            del self.leaving[name]
            for rows in self.source:
                rows[self._there(name)] = 0x77

    def _move(self, link: Link, waiting: list[str], pushes: dict[str, tuple[Push, list[tuple[int, int]]]]) -> None:
        with suppress(TransferError):
            if waiting and self.random.random() < 0.1:
                name = waiting.pop()
                push = link.begin(name, first_block=0, num_blocks=4, num_layers=LAYERS, timeout_s=5.0)
                pushes[name] = push, [(layer, first) for layer in range(LAYERS) for first in (0, 2)]
            elif pushes and self.random.random() < 0.3:
                name = self.random.choice(list(pushes))
                push, left = pushes[name]
                if not left:
                    del pushes[name]
                    self.leaving[name] = push
                    push.commit(name.encode())
                    return
                layer, first = left.pop(self.random.randrange(len(left)))
                try:
                    push.push(layer, first, self._there(name)[first : first + 2], self.source[layer])
                except TransferError as error:
                    if error.code == "RESOURCE_EXHAUSTED":
                        left.append((layer, first))
                    else:
                        del pushes[name]

    def _fault(self, pushes: dict[str, tuple[Push, list[tuple[int, int]]]]) -> None:
        name = self.random.choice("abc")
        match self.random.randrange(6):
            case 0:
                self.receiver.cancel(name).add_done_callback(lambda _fence: self._end(name, "cancel"))
            case 1 if name in pushes:
                pushes[name][0].abort("simulated")
            case 2:
                self.sender.close_link(RECEIVER.worker_id, RECEIVER.incarnation)
            case 3:
                fake_nccl.damage_next.append("payload")
            case 4:
                self._stop(self.random.choice(self.fakes))
            case 5 if self.fakes[0].communicators:
                self.random.choice(self.fakes[0].communicators).destroy()

    def _stop(self, fake: FakeNccl) -> None:
        for queue in fake.device.queues.values():
            if queue.step in self.world.steps:
                self.world.steps.remove(queue.step)

    def _expect(self, name: str) -> None:
        self.receiver.expect(
            name, block_ids=self._there(name), first_block=0, timeout_s=5.0,
            on_commit=lambda *_: self._end(name, "commit"), on_abort=lambda *_: self._end(name, "abort"),
        )  # fmt: skip

    def _end(self, name: str, how: str) -> None:
        """From now on these blocks are another's: they get a mark that must stay."""
        if how == "cancel" and self.endings[name]:
            return  # it had ended before
        self.endings[name].append(how)
        there = self._there(name)
        for cache, source in zip(self.cache, self.sent, strict=True):
            if how == "commit":
                assert torch.equal(cache[there], source[there]), f"{name} committed wrong bytes"
            else:
                cache[there] = 0xEE
        self.marked[name] = [cache[there].clone() for cache in self.cache]

    def _there(self, name: str) -> list[int]:
        start = 4 * "abc".index(name)
        return self.blocks[start : start + 4]

    def _transport(self) -> Transport:
        device = SteppedDevice(self.world)
        fake = FakeNccl(device, driven=True, abort_s=self.random.choice([0.0, 0.1, 3.0]))
        fake.now, fake.connect_s = self.world.now, self.random.choice([0.0, 0.0, 0.1])
        self.fakes.append(fake)
        return NcclTransport(Communicators(fake, device, self.world.lane, self.world.now))


class SteppedDevice(FakeDevice):
    """Each of its queues is a task, and sums come a little later."""

    def __init__(self, world: LinkWorld) -> None:
        super().__init__(driven=True, delay=lambda: world.random.randrange(3))
        self._world = world

    def queue(self) -> fake_nccl.FakeQueue:
        queue = super().queue()
        self._world.steps.append(queue.step)
        return queue


def test_whatever_the_schedule_no_wrong_byte_is_ever_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SCHEDULES):
        schedule = LinkSchedule(seed, monkeypatch)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            schedule.close()
