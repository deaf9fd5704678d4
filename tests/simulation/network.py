"""Connections between processes: in order, each message late by some random time, until something breaks them.

    a.send(frame) ── latency, never past the one before ──> b.received(frame), in b's process
    a.close()     ── after all that was sent ─────────────> b.lost(reason)

What may happen to one:

    reset        both ends learn of it at once: a process died, a router said so
    blackhole    nothing arrives any more, in one direction or both
    hold         what is sent arrives later, in order: a slow network

Where `pings` go over a connection, as tandem/rpc/endpoints.py has them, each end learns of a blackhole within
NOTICE_S; elsewhere it finds out by itself or never. A process that dies resets its connections. One that is paused
answers no ping: the others give up on it, and it learns of that when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.simulation.world import Process, World

LATENCY_S = (0.0001, 0.0005)
# By gRPC's own pings: the soonest and the latest that silence is noticed.
NOTICE_S = (15.0, 20.0)

Accept = Callable[["SimulatedEnd"], None]


@dataclass(slots=True)
class SimulatedListener:
    process: Process
    accept: Accept
    pings: bool


class SimulatedNetwork:
    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: list[SimulatedConnection] = []
        # Pairs of processes between which nothing new can be opened and nothing open gets anything across.
        self._cut: set[frozenset[Process]] = set()
        # How many messages were sent, and what is to be done as one is: it gets through only if its sender still lives.
        self.num_sent = 0
        self.triggers: dict[int, list[Callable[[], None]]] = {}
        self._listeners: dict[str, SimulatedListener] = {}
        self._numbers = count(1)
        self._ports = iter(range(20001, 60000))
        self._watched: set[Process] = set()

    def listen(self, process: Process, address: str, accept: Accept, *, pings: bool) -> str:
        """Take connections at host:port; port 0 chooses one. Returns the address.

        Raises:
            OSError: another live process has it.
        """
        host, _, port = address.rpartition(":")
        address = f"{host}:{next(self._ports)}" if port == "0" else address
        holder = self._listeners.get(address)
        if holder is not None and holder.process.alive:
            raise OSError(f"address in use: {address}")
        self._watch(process)
        self._listeners[address] = SimulatedListener(process, accept, pings)
        return address

    def unlisten(self, address: str) -> None:
        self._listeners.pop(address, None)

    def connect(
        self, process: Process, address: str, connected: Callable[[SimulatedEnd], None], refused: Callable[[str], None]
    ) -> None:
        """One of the two is called, in the process; neither where the other side does not answer at all."""
        self._watch(process)
        self.world.after(2 * self.latency(), self._arrive, process, address, connected, refused)

    def at_message(self, num_messages: int, callback: Callable[[], None]) -> None:
        """Call back as so many messages more are sent."""
        self.triggers.setdefault(self.num_sent + num_messages, []).append(callback)

    def sending(self) -> None:
        self.num_sent += 1
        if self.triggers:
            for callback in self.triggers.pop(self.num_sent, ()):
                callback()

    def number(self) -> int:
        return next(self._numbers)

    def latency(self) -> float:
        return self.world.random.uniform(*LATENCY_S)

    def between(self, one: Process, other: Process) -> list[SimulatedConnection]:
        return [c for c in self.connections if {c.ends[0].process, c.ends[1].process} == {one, other}]

    def cut(self, one: Process, other: Process) -> None:
        """From now on nothing gets from one to the other, nor back, until `mend`."""
        self._cut.add(frozenset((one, other)))
        for connection in self.between(one, other):
            connection.blackhole()

    def mend(self, one: Process, other: Process) -> None:
        """Connections can be opened again; those that were blackholed stay so."""
        self._cut.discard(frozenset((one, other)))

    def mend_all(self) -> None:
        self._cut.clear()

    def _arrive(
        self, process: Process, address: str, connected: Callable[[SimulatedEnd], None], refused: Callable[[str], None]
    ) -> None:
        listener = self._listeners.get(address)
        if not process.alive:
            return
        if listener is not None and frozenset((process, listener.process)) in self._cut:
            return
        if listener is None or not listener.process.alive:
            process.deliver(refused, f"connection refused: {address}")
            return
        connection = SimulatedConnection(self, process, listener)
        self.connections.append(connection)
        if listener.pings:  # HTTP/2 has a handshake
            listener.process.deliver(self._greet, listener, connection, connected)
        else:
            listener.process.deliver(listener.accept, connection.ends[1])
            process.deliver(connected, connection.ends[0])

    def _greet(
        self, listener: SimulatedListener, connection: SimulatedConnection, connected: Callable[[SimulatedEnd], None]
    ) -> None:
        listener.accept(connection.ends[1])
        connection.ends[0].process.deliver(connected, connection.ends[0])

    def _watch(self, process: Process) -> None:
        if process not in self._watched:
            self._watched.add(process)
            process.watchers.append(self._changed)

    def _changed(self, process: Process) -> None:
        for connection in [c for c in self.connections if process in (c.ends[0].process, c.ends[1].process)]:
            if not process.alive:
                connection.reset("connection reset by peer")
            elif process.paused:
                connection.await_answer(process)


class SimulatedConnection:
    """Two ends. Made by the network."""

    def __init__(self, network: SimulatedNetwork, dialler: Process, listener: SimulatedListener) -> None:
        self.network = network
        self.number = network.number()
        self.ends = SimulatedEnd(self, dialler), SimulatedEnd(self, listener.process)
        self._pings = listener.pings
        self.ends[0].peer, self.ends[1].peer = self.ends[1], self.ends[0]

    def reset(self, reason: str) -> None:
        for end in self.ends:
            end.lose(reason, self.network.world.now + self.network.latency())
        self.forget()

    def blackhole(self, towards: Process | None = None) -> None:
        """Nothing arrives any more, at that process or at both."""
        for end in self.ends:
            end.deaf = end.deaf or towards in (None, end.process)
        if self._pings:
            notice_s = self.network.world.random.uniform(*NOTICE_S)
            self.network.world.after(notice_s, self.reset, "no answer to a keepalive ping")

    def hold(self, seconds: float) -> None:
        """Delays everything sent from now on by at least so many seconds."""
        for end in self.ends:
            end.arrives_at = max(end.arrives_at, self.network.world.now + seconds)

    def await_answer(self, process: Process) -> None:
        """The other end gives up on a process that is paused for long."""
        if not self._pings:
            return

        def check(pauses: int) -> None:
            if process.paused and process.pauses == pauses:
                self.reset("no answer to a keepalive ping")

        self.network.world.after(self.network.world.random.uniform(*NOTICE_S), check, process.pauses)

    def forget(self) -> None:
        if self in self.network.connections:
            self.network.connections.remove(self)


class SimulatedEnd:
    """One process's end. Set `received` and `lost` before anything can arrive."""

    def __init__(self, connection: SimulatedConnection, process: Process) -> None:
        self.connection = connection
        self.process = process
        self.peer: SimulatedEnd
        self.received: Callable[[Any], None] = _ignore
        self.lost: Callable[[str], None] = _ignore
        self.open = True
        self.deaf = False
        self.arrives_at = 0.0

    def send(self, frame: Any) -> None:
        """To the other end; into the void where there is none any more."""
        network, peer = self.connection.network, self.peer
        if not self.open or not self.process.alive:
            return
        network.sending()
        network.world.log("message", self.process.name, peer.process.name, self.connection.number, frame)
        if not self.process.alive:
            return
        peer.arrives_at = max(peer.arrives_at, network.world.now + network.latency())
        # By its moment, for how long it takes until then is rounded, and might order what arrives together anew.
        network.world.at(peer.arrives_at, peer.arrive, frame)

    def close(self, reason: str = "closed by the other side") -> None:
        """This end is told nothing more; the other one once it has all that was sent."""
        if not self.open:
            return
        self.open = False
        if self.process.alive and not self.peer.deaf:
            self.peer.lose(reason, max(self.peer.arrives_at, self.connection.network.world.now))
        self.connection.forget()

    def abort(self) -> None:
        """As RST: what is under way does not arrive any more."""
        self.close()
        self.peer.deaf = True

    def arrive(self, frame: Any) -> None:
        if self.open and not self.deaf:
            self.process.deliver(self._receive, frame)

    def lose(self, reason: str, moment: float) -> None:
        self.connection.network.world.at(moment, self.process.deliver, self._lose, reason)

    def _receive(self, frame: Any) -> None:
        if self.open:
            self.received(frame)

    def _lose(self, reason: str) -> None:
        if self.open:
            self.open = False
            self.lost(reason)


def _ignore(_: Any) -> None:
    pass
