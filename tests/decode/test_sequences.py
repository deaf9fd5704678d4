"""A decode worker releases all it holds, whatever ends a sequence and whenever: a real engine, receiver and sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.decode.sequences import DecodeSequences, Reservation
from tandem.engine import EngineConfig, Request, SampledToken, SamplingParams, StepTime
from tandem.transfer import LinkPeer, LocalPeer, Push, Receiver, Sender, TransferError
from tandem.v1 import worker_pb2
from tandem.worker import InlineEngine, SequenceFailed, Streams
from tandem.worker.engine.beside import land, release
from tests.spans import attributes, catalogued, seen

BLOCKS, BLOCK, WHOLE = 8, 16, 8 * 16 - 8
INCARNATION = "p-1"


@dataclass
class Decode:
    engine: InlineEngine
    receiver: Receiver
    sequences: DecodeSequences
    streams: Streams
    answers: dict[str, asyncio.Future[Reservation | None]] = field(default_factory=dict)
    readers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    outputs: list[worker_pb2.SequenceOutput] = field(default_factory=list)

    async def connect(self, stream_id: str) -> None:
        async def read() -> None:
            async for message in self.streams.stream(stream_id):
                self.outputs.extend(message.outputs)
                for output in message.outputs:
                    answer = self.answers.get(output.request_id)
                    if answer and not answer.done() and output.HasField("failure"):
                        answer.set_exception(SequenceFailed(output.failure.code, output.failure.message))

        self.readers[stream_id] = asyncio.create_task(read())
        while not self.streams.is_open(stream_id):
            await asyncio.sleep(0)

    async def disconnect(self, stream_id: str) -> None:
        self.readers[stream_id].cancel()
        await asyncio.wait([self.readers[stream_id]])

    async def reserve(self, name: str, prompt: int = WHOLE, stream: str = "g", timeout_s: float = 20.0) -> str:
        request = Request(name, [len(name)] * prompt, SamplingParams(max_tokens=8, temperature=0))
        answer = self.answers[name] = asyncio.get_running_loop().create_future()
        self.sequences.reserve(request, stream, timeout_s, INCARNATION)
        reservation = await answer
        assert reservation is not None
        return reservation.transfer_id

    def reserved(self, stream_id: str, request_id: str, reservation: Reservation | None, num_fetched: int) -> None:
        self.answers[request_id].set_result(reservation)

    async def released(self) -> None:
        """Until every block is free and nothing is held."""
        async with asyncio.timeout(60):
            while len(self.sequences) or self.engine.stats.free_blocks < BLOCKS:
                await asyncio.sleep(0.01)
        await self.engine.call(lambda engine: engine.check_integrity())

    async def failure(self) -> tuple[str, str]:
        async with asyncio.timeout(60):
            while not self.outputs:
                await asyncio.sleep(0.01)
        return self.outputs[-1].failure.code, self.outputs[-1].failure.message


@pytest.fixture
async def decode(demo_model: Path) -> AsyncIterator[Decode]:
    engine = InlineEngine(EngineConfig(demo_model, "demo", block_size=BLOCK, num_blocks=BLOCKS, null=StepTime()))
    local = LinkPeer("decode-0", "d-1", engine.engine.layout.hash)
    receiver = Receiver(LocalPeer(local), engine.engine.kv_cache, host="127.0.0.1")
    numbers = count()

    streams = Streams("d-1", lambda stream_id: made.sequences.stream_ended(stream_id))
    sequences = DecodeSequences(
        engine, receiver, streams, reserved=lambda *answer: made.reserved(*answer),
        first_token=lambda payload: SampledToken(int(payload)), new_id=lambda: f"t{next(numbers)}",
        worker_id="decode-0",
    )  # fmt: skip
    made = Decode(engine, receiver, sequences, streams)
    engine.start(sequences.on_events, lambda error: None)
    await made.connect("g")
    yield made
    await sequences.close()
    for stream_id in made.readers:
        await made.disconnect(stream_id)
    streams.close()
    receiver.close()
    engine.close()


@pytest.fixture
def sender(decode: Decode) -> AsyncIterator[Sender]:
    sender = Sender(LocalPeer(LinkPeer("prefill-0", INCARNATION, decode.engine.engine.layout.hash)))
    yield sender  # type: ignore[misc]
    sender.close()


async def waits(decode: Decode) -> None:
    """Until one waits for blocks."""
    async with asyncio.timeout(60):
        while not len(decode.sequences._block_queue):
            await asyncio.sleep(0)


async def begin(sender: Sender, decode: Decode, transfer_id: str) -> Push:
    receiver = decode.receiver
    link = await asyncio.wrap_future(sender.open_link(receiver.identity, receiver.address, timeout_s=5.0))
    return link.begin(transfer_id, first_block=0, num_blocks=BLOCKS, num_layers=2, timeout_s=20)


async def test_the_deadline_passes_while_it_waits_for_blocks(decode: Decode) -> None:
    await decode.reserve("a")
    with pytest.raises(SequenceFailed, match="deadline") as failed:
        await decode.reserve("b", timeout_s=0.1)
    assert failed.value.code == "DEADLINE_EXCEEDED"
    await decode.sequences.abort("a")
    await decode.released()


async def test_waiting_for_blocks_does_not_put_the_deadline_off(decode: Decode) -> None:
    now = asyncio.get_running_loop().time
    for timeout_s in (1.0, 4.0, 16.0):  # the longer ones where this machine stood still in the wrong moment
        await decode.reserve("a")
        start = now()
        waiting = asyncio.create_task(decode.reserve("b", timeout_s=timeout_s))
        await asyncio.sleep(0.7 * timeout_s)
        await decode.sequences.abort("a")
        try:
            await waiting
        except SequenceFailed:
            continue
        finally:
            await decode.released()
        assert (await decode.failure())[0] == "DEADLINE_EXCEEDED"
        if now() - start < 1.5 * timeout_s:
            return
    pytest.fail("the deadline came later")


async def test_a_disconnect_during_a_transfer_stops_it_and_releases_its_blocks(decode: Decode, sender: Sender) -> None:
    push = await begin(sender, decode, await decode.reserve("a"))
    kv = torch.zeros_like(decode.engine.engine.kv_cache[0])
    await asyncio.to_thread(push.push, 0, 0, range(4), kv)
    await decode.disconnect("g")
    await decode.released()

    async def go_on() -> None:
        """Until the sender has heard of it."""
        while True:
            push.push(1, 0, range(4), kv)
            await asyncio.sleep(0.01)

    with pytest.raises(TransferError):
        await asyncio.wait_for(go_on(), 60)


async def test_a_lost_gateway_leaves_nothing_waiting_landing_or_running(decode: Decode) -> None:
    decode.answers["runs"] = asyncio.get_running_loop().create_future()
    decode.sequences.add(Request("runs", [1] * 40, SamplingParams(max_tokens=8)), "g", 20.0)
    assert await decode.answers["runs"] is None
    await decode.reserve("lands", prompt=16)
    waiting = asyncio.create_task(decode.reserve("waits"))
    await waits(decode)
    await decode.disconnect("g")
    await decode.released()
    assert not waiting.done()
    waiting.cancel()


async def test_a_gateway_that_is_back_at_once_keeps_nothing_of_its_broken_stream(decode: Decode) -> None:
    await decode.reserve("a")
    await decode.disconnect("g")
    await decode.connect("again")
    await decode.released()
    await decode.reserve("b", stream="again")
    with pytest.raises(SequenceFailed, match="stream has ended"):
        await decode.reserve("late", stream="g")
    await decode.sequences.abort("b")
    await decode.released()


async def test_a_prompt_that_is_refused_in_the_turn_in_which_its_stream_ends_is_one_failure(decode: Decode) -> None:
    """Whichever of the turns in between the stream ends in."""
    failures = set[str]()
    for turns in range(20):
        await decode.connect(stream := f"g{turns}")
        refused = asyncio.create_task(decode.reserve("huge", prompt=(BLOCKS + 1) * BLOCK, stream=stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        decode.sequences.stream_ended(stream)
        with pytest.raises(SequenceFailed) as failed:
            await refused
        failures.add(failed.value.code)
        await decode.released()
    assert failures == {"UNAVAILABLE", "INVALID_ARGUMENT"}


async def test_aborted_while_it_waits_for_blocks(decode: Decode) -> None:
    await decode.reserve("a")
    waiting = asyncio.create_task(decode.reserve("b"))
    await waits(decode)
    await decode.sequences.abort("b")
    assert not len(decode.sequences._block_queue)
    await decode.sequences.abort("a")
    await decode.released()
    assert not waiting.done()
    waiting.cancel()


async def test_a_suspect_that_waits_for_blocks_is_one_that_has_begun(decode: Decode) -> None:
    await decode.reserve("a")
    decode.answers["b"] = asyncio.get_running_loop().create_future()
    suspect = Request("b", [1] * WHOLE, SamplingParams(max_tokens=8), alone_until=1)
    decode.sequences.reserve(suspect, "g", 20.0, INCARNATION)
    await waits(decode)
    assert (decode.sequences.num_entering_suspects(), decode.engine.engine.num_suspects) == (1, 0)
    await decode.sequences.abort("a")
    await decode.answers["b"]
    assert (decode.sequences.num_entering_suspects(), decode.engine.engine.num_suspects) == (0, 1)
    await decode.sequences.abort("b")
    await decode.released()


async def test_an_id_is_free_again_once_it_is_released(decode: Decode) -> None:
    await decode.reserve("a")
    aborting = [asyncio.create_task(decode.sequences.abort("a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(SequenceFailed, match="running here"):
        await decode.reserve("a")
    await asyncio.gather(*aborting)
    await decode.reserve("a")
    await decode.sequences.abort("a")
    await decode.released()


async def test_refused_while_it_is_aborted_it_is_released_once(decode: Decode) -> None:
    """The engine's refusal is on its way: not the end of the abort, nor anything of the sequence that comes next."""
    for turns in range(12):
        refused = asyncio.create_task(decode.reserve("huge", prompt=(BLOCKS + 1) * BLOCK))
        for _ in range(turns):
            await asyncio.sleep(0)
        await decode.sequences.abort("huge")
        refused.cancel()
        await asyncio.wait([refused])
        await decode.reserve("huge")
        await decode.sequences.abort("huge")
        await decode.released()
    assert {output.failure.code for output in decode.outputs} <= {"INVALID_ARGUMENT"}


class SlowFence:
    """The receiver, with a write in progress that ends when `written` is set."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.expect = receiver.expect
        self.written = Future[None]()

    def cancel(self, transfer_id: str) -> Future[None]:
        self._receiver.cancel(transfer_id).result(60)
        return self.written


async def test_a_late_fence_holds_the_blocks_until_it_holds(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.decode.sequences.FENCE_WAIT_S", 0.05)
    await decode.reserve("a")
    slow = decode.sequences._receiver = SlowFence(decode.receiver)
    aborting = asyncio.create_task(decode.sequences.abort("a"))
    reason = await asyncio.wait_for(decode.sequences.stuck, 60)
    assert "still being written" in reason
    assert not aborting.done()
    assert decode.engine.stats.free_blocks == 0
    assert len(decode.sequences) == 1
    slow.written.set_result(None)
    await aborting
    await decode.released()


async def test_a_first_token_that_cannot_be_is_a_failure_at_once(decode: Decode, sender: Sender) -> None:
    push = await begin(sender, decode, await decode.reserve("a"))
    for layer in range(2):
        await asyncio.to_thread(push.push, layer, 0, range(BLOCKS), decode.engine.engine.kv_cache[layer])
    push.commit(b"99999999")
    code, message = await decode.failure()
    assert code == "INTERNAL"
    assert "first_token" in message
    await decode.released()


async def test_the_catalogue_says_what_a_decode_worker_records(
    decode: Decode, sender: Sender, spans: InMemorySpanExporter
) -> None:
    transfer_id = await decode.reserve("a")
    push = await begin(sender, decode, transfer_id)
    for layer, kv in enumerate(decode.engine.engine.kv_cache):
        push.push(layer, 0, range(BLOCKS), kv)
    await asyncio.wrap_future(push.commit(b"7"))
    await decode.released()
    decode.answers["b"] = asyncio.get_running_loop().create_future()
    decode.sequences.add(Request("b", [2] * BLOCK, SamplingParams(max_tokens=8, ignore_eos=True)), "g", 20.0)
    await decode.released()
    expected = catalogued("decode")
    assert seen(spans.get_finished_spans(), *expected) == expected
    span = spans.get_finished_spans()[-1]
    assert "tandem.truncated" not in attributes(span)
    assert [event.attributes["decode.tokens"] for event in span.events if event.name == "step"] == [1, 2, 4, 8]


async def test_an_aborted_sequence_says_that_it_was_truncated(decode: Decode, spans: InMemorySpanExporter) -> None:
    await decode.reserve("a")
    await decode.sequences.abort("a")
    (span,) = spans.get_finished_spans()
    assert (attributes(span)["decode.finish_reason"], attributes(span)["tandem.truncated"]) == ("abort", True)


CHAIN = [bytes([number]) * 16 for number in range(5)]  # a root and four blocks


async def test_who_waits_for_blocks_gets_those_that_were_restored(decode: Decode) -> None:
    assert await decode.engine.call(lambda engine: engine.moving.expect("restored", CHAIN, 0))
    waiting = asyncio.create_task(decode.reserve("a"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    land(decode.engine, "restored", 0, 4)
    await asyncio.wait_for(waiting, 10)
    await decode.disconnect("g")
    await decode.released()


async def test_who_waits_for_blocks_gets_those_that_were_lent(decode: Decode) -> None:
    assert await decode.engine.call(lambda engine: engine.moving.expect("restored", CHAIN, 0))
    land(decode.engine, "restored", 0, 4)
    assert len(await decode.engine.call(lambda engine: engine.moving.lend("lent", CHAIN[1:]).blocks)) == 4
    waiting = asyncio.create_task(decode.reserve("a"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    release(decode.engine, "lent")
    await asyncio.wait_for(waiting, 10)
    await decode.disconnect("g")
    await decode.released()
