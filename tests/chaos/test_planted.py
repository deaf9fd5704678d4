"""The explorer can fail: bugs of a few lines, planted one at a time, are each found within so many schedules.

Where a bug shows under few kinds of faults, the schedules are those of a swarm of these.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from services.decode.block_queue import BlockQueue
from services.decode.sequences import DecodeSequences
from services.gateway.admission import Admission
from services.gateway.directory.roster import Roster
from services.gateway.errors import WorkerLost
from services.gateway.generation import pipeline
from services.gateway.generation.attempt import Attempt
from services.gateway.generation.choice import Choice
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.recovery.migration import Migration
from services.gateway.generation.recovery.suspicion import Suspicion
from services.gateway.routing import Router
from services.gateway.workers import Mailbox, WorkerPool
from tandem.engine.null_runner import NullRunner
from tandem.engine.scheduling import sequence
from tandem.liveness.silence import LIMIT_S, Liveness
from tandem.process.log_output import LogOutput
from tandem.registry import ModelKey
from tandem.tiers import block_files
from tandem.transfer.protocol.receiver import ReceiverProtocol
from tandem.worker import Streams, Worker
from tandem.worker.kv import tiers
from tests.chaos.explorer.run import Explorer
from tests.chaos.explorer.schedule import AMPLE_BLOCKS, SHAPES, SOLE_PREFILL, schedule_of
from tests.marks import long_but
from tests.simulation.cluster import ClusterShape
from tests.simulation.redis import RedisStore

Patch = pytest.MonkeyPatch
WITH_DISKS = [shape for shape in SHAPES if shape.disk_blocks]


@dataclass(frozen=True)
class Planted:
    """A bug, how it shows, and within how many schedules it has to be found."""

    plant: Callable[[Patch], None]
    shows: str
    within: int
    kinds: tuple[str, ...]
    shapes: Sequence[ClusterShape]


PLANTED: dict[str, Planted] = {}
# Found within seconds.
AT_ONCE = ("emit_twice",)


def planted(
    shows: str, within: int, *kinds: str, shapes: Sequence[ClusterShape] = SHAPES
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """
    Args:
        shows: found in the violation.
        kinds: the faults that the schedules are made of; any where none is named.
        shapes: the clusters that the schedules are drawn for.
    """

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTED[plant.__name__] = Planted(plant, shows, within, kinds, shapes)
        return plant

    return add


@pytest.fixture(scope="module")
def explorer(store: RedisStore, demo_model: Path) -> Explorer:
    return Explorer(store, demo_model)


async def _nothing(*_: Any, **__: Any) -> None: ...


@planted("outlives its sequence", 60)
def skip_the_fence(patch: Patch) -> None:
    async def no_fence(self: DecodeSequences, held: Any) -> None:
        self._leave_engine(held)

    patch.setattr(DecodeSequences, "_fence", no_fence)


@planted("KV is damaged", 40, "kv-drop")
def commit_without_all_frames(patch: Patch) -> None:
    patch.setattr(ReceiverProtocol, "_commit", lambda self, landing, payload, _: self.landings.commit(landing, payload))


@planted("KV is damaged", 60, "kv-corrupt")
def believe_a_damaged_frame(patch: Patch) -> None:
    written = ReceiverProtocol.written
    patch.setattr(ReceiverProtocol, "written", lambda self, write, _: written(self, write, write.message.payload_sum))


@planted("I3: redis", 5)
def drop_a_release(patch: Patch) -> None:
    patch.setattr(Router, "release", _nothing)


@planted("I2", 10)
def sample_with_the_batch_index(patch: Patch) -> None:
    execute, draw = NullRunner.execute, NullRunner._draw
    index: dict[str, int] = {}

    def numbered(self: NullRunner, batch: list[Any]) -> Any:
        index.update({item.seq.request_id: i for i, item in enumerate(batch)})
        return execute(self, batch)

    def drawn(self: NullRunner, seq: Any, row: Any) -> Any:
        token = draw(self, seq, row)
        return token._replace(token_id=(token.token_id + index.get(seq.request_id, 0)) % self._vocab_size)

    patch.setattr(NullRunner, "execute", numbered)
    patch.setattr(NullRunner, "_draw", drawn)


@planted("I2", 5)
def emit_twice(patch: Patch) -> None:
    """Takes every token of a stream as new, even the first one, which the prefill worker's reply had brought."""
    accept = Mailbox.accept

    def all_new(self: Mailbox, output: Any) -> Any:
        self.next_index = min(self.next_index, output.first_index)
        return accept(self, output)

    put = Streams.send

    def twice(self: Streams, stream_id: str, output: Any, *target: float) -> None:
        put(self, stream_id, output, *target)
        if output.finished and output.first_index:
            outbox = self._outboxes.get(stream_id)
            if outbox is not None:
                outbox._ready.append(outbox._ready[-1])

    patch.setattr(Mailbox, "accept", all_new)
    patch.setattr(Streams, "send", twice)


@planted("I3", 200)
def no_abort_on_disconnect(patch: Patch) -> None:
    patch.setattr(Attempt, "_abort", lambda self, connection, mailbox: None)


@planted("DEADLINE_EXCEEDED", 60, shapes=[shape for shape in SHAPES if shape.num_blocks < AMPLE_BLOCKS])
def wake_nobody_who_waits_for_blocks(patch: Patch) -> None:
    patch.setattr(BlockQueue, "look_again", lambda self: None)


@planted("I4", 60)
def share_blocks_across_salts(patch: Patch) -> None:
    root_hash = sequence.root_hash
    patch.setattr(sequence, "root_hash", lambda model, revision, lora, salt: root_hash(model, revision, lora, ""))


@planted("INTERNAL|I2", 20)
def reuse_a_request_id(patch: Patch) -> None:
    init = Pipeline.__init__

    def same(self: Pipeline, *arguments: Any) -> None:
        init(self, *arguments)
        vars(self)["_nonce"] = lambda: "same"

    patch.setattr(Pipeline, "__init__", same)
    patch.setattr(Choice, "name", "one")


@planted("not whole again", 10, "kill")
def ignore_the_incarnation(patch: Patch) -> None:
    connection = WorkerPool.connection
    patch.setattr(
        WorkerPool, "connection", lambda self, info: self._connections.get(info.worker_id) or connection(self, info)
    )


@planted("DEADLINE_EXCEEDED", 5)
def lose_the_end_of_an_answer(patch: Patch) -> None:
    send = Streams.send

    def without(self: Streams, stream_id: str, output: Any, *target: float) -> None:
        if not output.finished:
            send(self, stream_id, output, *target)

    patch.setattr(Streams, "send", without)


@planted("I2", 20, "kill", "reset")
def go_on_behind_the_wrong_token(patch: Patch) -> None:
    behind = pipeline._continue_behind
    patch.setattr(pipeline, "_continue_behind", lambda sequence, written: behind(sequence, written[:-1]))


@planted("UNAVAILABLE", 60, "kill", "reset")
def never_go_on_elsewhere(patch: Patch) -> None:
    def lost(self: Migration, error: WorkerLost, *_: Any) -> None:
        raise error

    patch.setattr(Migration, "lost", lost)


@planted("I5", 20, "kill", "reset")
def keep_the_loss_to_oneself(patch: Patch) -> None:
    note = Attempt._note_route

    def without(self: Attempt, route: Any) -> None:
        self._choice.lost = ""
        note(self, route)

    patch.setattr(Attempt, "_note_route", without)


@planted("R9", 20, "kill")
def be_unready_with_a_peer(patch: Patch) -> None:
    """Ready as long as a link stands."""

    async def announce(self: Worker, server: Any) -> None:
        await self._lease.held.wait()
        while not self._leaving.is_set():
            await server.set_serving(linked := await self._any_of(self._is_linked))
            if linked:
                self.ready.set()
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()

    patch.setattr(Worker, "_announce", announce)


@planted("I7", 10, "poison")
def suspect_nobody(patch: Patch) -> None:
    patch.setattr(Suspicion, "lost", _nothing)


@planted("FAILED_PRECONDITION|I7", 40, "poison")
def let_suspects_share_their_steps(patch: Patch) -> None:
    """So a neighbour that was with a poison twice is named twice."""
    patch.setattr(Suspicion, "alone_until", 0)


@planted("I3", 5)
def stay_admitted(patch: Patch) -> None:
    patch.setattr(Admission, "leave", lambda self, work: None)


@planted("I4: an incarnation", 10, "kill")
def use_an_incarnation_again_after_a_kill(patch: Patch) -> None:
    init = Worker.__init__

    def named(self: Worker, settings: Any, worker_id: str, build: Any, ports: Any) -> None:
        new_ids = chain([worker_id], iter(ports.new_id, ""))
        init(self, settings, worker_id, build, replace(ports, new_id=lambda: next(new_ids)))

    patch.setattr(Worker, "__init__", named)


@planted("I8", 20, "starve", shapes=[SOLE_PREFILL])
def take_the_slow_for_dead(patch: Patch) -> None:
    patch.setattr(Liveness, "limit_s", LIMIT_S)


@planted("", 20, "log-full", "kill", "reset")
def raise_where_the_log_disk_is_full(patch: Patch) -> None:
    patch.setattr(LogOutput, "write", lambda self, text: os.write(self.fileno(), text.encode()))


@planted("I1: took", 60, "kill", "kv-drop")
def prolong_the_deadline_at_each_migration(patch: Patch) -> None:
    """Its client, and the guard of one that does not read, end it nearly in time."""
    init = Attempt.__init__

    def later(self: Attempt, cluster: Any, choice: Choice) -> None:
        init(self, cluster, choice)
        self._deadline += 3.0 * choice.migrated

    patch.setattr(Attempt, "__init__", later)


@planted(r"g\d: \d+ tasks where", 40)
def a_model_that_has_left_keeps_its_tasks(patch: Patch) -> None:
    async def drop(roster: Roster, key: ModelKey) -> None:
        roster._lives.pop(key)
        roster.directory.llms.pop(key, None)

    patch.setattr(Roster, "_drop", drop)


@planted("is not served 2.0 s after", 300)
def a_model_that_joins_waits(patch: Patch) -> None:
    load = Roster._load

    async def late(roster: Roster, key: ModelKey, addresses: Sequence[str]) -> None:
        if key.name == "joining":
            await asyncio.sleep(2.5)
        await load(roster, key, addresses)

    patch.setattr(Roster, "_load", late)


@planted("KV is damaged", 60, "disk-damage", "kill", shapes=WITH_DISKS)
def believe_a_damaged_file(patch: Patch) -> None:
    patch.setattr(block_files, "xxh3_64_intdigest", lambda block: 0)


@planted("blocks are not free", 5, "disk-late", shapes=WITH_DISKS)
def keep_the_blocks_that_a_tier_copies(patch: Patch) -> None:
    patch.setattr(tiers, "release", lambda port, name: None)


@pytest.mark.timeout(900)  # schedules are counted, not their seconds
@pytest.mark.parametrize("name", long_but(AT_ONCE, PLANTED))
def test_a_planted_bug_is_found(explorer: Explorer, monkeypatch: Patch, name: str) -> None:
    bug = PLANTED[name]
    bug.plant(monkeypatch)
    for seed in range(bug.within):
        violations = explorer.run(schedule_of(seed, bug.kinds, bug.shapes)).violations
        if any(re.search(bug.shows, violation) for violation in violations):
            print(f"{name}: {seed + 1} schedules: {violations[0]}")
            return
    pytest.fail(f"not found within {bug.within} schedules")
