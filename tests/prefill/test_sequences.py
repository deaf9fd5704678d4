"""A prefill worker releases all it holds for a prompt, whatever ends it: a real engine, sender and receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from services.prefill.metrics import TransferMetrics
from services.prefill.sequences import Prefilled, PrefillSequences, Ticket
from tandem.adapters import AdapterRef
from tandem.engine import EngineConfig, Request, SamplingParams, SequenceOutput, StepTime
from tandem.transfer import Link, LinkPeer, LocalPeer, Receiver, Sender, TransferError
from tandem.worker import Holder, InlineEngine, KVFetcher, SequenceFailed
from tests.spans import attributes, catalogued, seen

BLOCKS, BLOCK, PROMPT = 16, 16, 8 * 16
# A chunk of 32 tokens takes a tenth of a second.
SLOW = StepTime(prefill_tokens_per_s=320)


@dataclass
class Prefill:
    engine: InlineEngine
    sequences: PrefillSequences
    receiver: Receiver
    metrics: CollectorRegistry
    ends: list[str] = field(default_factory=list)
    reachable: bool = True
    payload: bytes | None = b"first"

    def expect(self, transfer_id: str) -> None:
        self.receiver.expect(
            transfer_id, block_ids=range(8), first_block=0, timeout_s=120,
            on_commit=lambda payload, num_bytes: self.ends.append(f"{transfer_id}: {payload.decode()}, {num_bytes}"),
            on_abort=lambda code, reason: self.ends.append(f"{transfer_id}: {code}"),
        )  # fmt: skip

    async def run(
        self, name: str, timeout_s: float = 60.0, lora: AdapterRef | None = None, holder: Holder | None = None
    ) -> Prefilled:
        ticket = Ticket(f"t-{name}", self.receiver.identity, self.receiver.address, 0, PROMPT // BLOCK)
        request = Request(name, [len(name)] * PROMPT, SamplingParams(max_tokens=8, temperature=0), lora=lora)
        return await self.sequences.prefill(request, ticket, timeout_s, holder)

    async def reads(self) -> None:
        """Until a first chunk is read, and pushed."""
        async with asyncio.timeout(60):
            while not self.engine.stats.num_prefilled_tokens:
                await asyncio.sleep(0.01)

    def failures(self) -> dict[str, float]:
        """Transfers that failed, by transport and code."""
        return {
            f"{sample.labels['transport']} {sample.labels['code']}": sample.value
            for sample in samples(self.metrics, "tandem_transfer_failures_total")
        }

    async def released(self, *ends: str) -> None:
        """Until every block is free, nothing runs, and the receiver has seen these ends."""
        async with asyncio.timeout(60):
            while len(self.sequences) or self.engine.stats.free_blocks < BLOCKS or self.ends != list(ends):
                await asyncio.sleep(0.01)
        await self.engine.call(lambda engine: engine.check_integrity())


def samples(registry: CollectorRegistry, name: str) -> list[Sample]:
    return [sample for metric in registry.collect() for sample in metric.samples if sample.name == name]


@pytest.fixture
async def prefill(demo_model: Path) -> AsyncIterator[Prefill]:
    config = EngineConfig(demo_model, "demo", block_size=BLOCK, num_blocks=BLOCKS, max_num_batched_tokens=32, null=SLOW)
    engine = InlineEngine(config)
    layout = engine.engine.layout.hash
    receiver = Receiver(
        LocalPeer(LinkPeer("decode-0", "d-1", layout)),
        [torch.zeros_like(kv) for kv in engine.engine.kv_cache],
        host="127.0.0.1",
    )
    sender = Sender(LocalPeer(LinkPeer("prefill-0", "p-1", layout)))

    async def link_to(remote: LinkPeer, address: str) -> Link:
        if not made.reachable:
            raise TransferError("UNAVAILABLE", "nobody answers")
        return await asyncio.wrap_future(sender.open_link(remote, address, timeout_s=60))

    loop = asyncio.get_running_loop()

    def payload(output: SequenceOutput) -> bytes:
        if made.payload is None:
            raise ValueError("this token is in no message")
        return made.payload

    fetcher = KVFetcher(engine, receiver, link_to, address=receiver.address, new_id=lambda: uuid4().hex)
    registry = CollectorRegistry()
    metrics = TransferMetrics(registry, ("demo", "prefill", "prefill-0"))
    sequences = PrefillSequences(
        engine, link_to, fetcher, payload=payload, now=loop.time, worker_id="prefill-0", metrics=metrics
    )
    made = Prefill(engine, sequences, receiver, registry)
    engine.start(sequences.on_events, lambda error: None)
    yield made
    sender.close()
    receiver.close()
    engine.close()


async def test_the_whole_prompt_lands_with_its_first_token(prefill: Prefill) -> None:
    prefill.expect("t-a")
    done = await prefill.run("a")
    assert len(done.output.tokens) == 1
    assert done.transfer_bytes == PROMPT * 32
    await prefill.released(f"t-a: first, {PROMPT * 32}")
    pair = {"model_name": "demo", "role": "prefill", "worker": "prefill-0", "peer": "decode-0", "transport": "shm"}
    async with asyncio.timeout(60):  # until the decode worker's word has come back
        while not samples(prefill.metrics, "tandem_transfer_exposed_seconds_sum"):
            await asyncio.sleep(0.01)
    [moved] = samples(prefill.metrics, "tandem_transfer_bytes_total")
    assert (moved.labels, moved.value) == (pair, PROMPT * 32)
    [seconds] = samples(prefill.metrics, "tandem_transfer_seconds_sum")
    [exposed] = samples(prefill.metrics, "tandem_transfer_exposed_seconds_sum")
    assert 0 < exposed.value < seconds.value
    assert prefill.failures() == {}


async def test_the_decode_worker_hears_of_it_before_an_adapter_is_read(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits 2 s for the beginning, and a large adapter may take longer."""
    prefill.expect("t-a")
    landing = prefill.receiver._landings.table.live["t-a"]

    async def prepare(request: Request, timeout_s: float) -> None:
        async with asyncio.timeout(60):
            while landing.link is None:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(prefill.engine, "prepare", prepare)
    await prefill.run("a")
    await prefill.released(f"t-a: first, {PROMPT * 32}")


async def test_a_commit_that_cannot_be_made_releases_the_landing_at_once(prefill: Prefill) -> None:
    prefill.expect("t-a")
    prefill.payload = None
    with pytest.raises(ValueError, match="in no message"):
        await prefill.run("a")
    await prefill.released("t-a: ABORTED")


async def test_an_adapter_that_is_not_there_ends_the_transfer(prefill: Prefill) -> None:
    prefill.expect("t-a")
    with pytest.raises(SequenceFailed, match="lora"):
        await prefill.run("a", lora=AdapterRef("mine", "nowhere", "1"))
    await prefill.released("t-a: ABORTED")


async def test_a_caller_that_leaves_during_the_transfer_ends_it_on_both_sides(prefill: Prefill) -> None:
    prefill.expect("t-a")
    running = asyncio.create_task(prefill.run("a"))
    await prefill.reads()
    assert prefill.engine.stats.free_blocks < BLOCKS
    running.cancel()
    await asyncio.wait([running])
    await prefill.released("t-a: ABORTED")
    assert prefill.failures() == {}
    assert samples(prefill.metrics, "tandem_transfer_bytes_total") == []


async def test_the_deadline_passes_while_it_computes(prefill: Prefill) -> None:
    prefill.expect("t-a")
    with pytest.raises(SequenceFailed, match="deadline") as failed:
        await prefill.run("a", timeout_s=0.25)
    assert failed.value.code == "DEADLINE_EXCEEDED"
    await asyncio.sleep(0)
    assert [end.partition(":")[0] for end in prefill.ends] in ([], ["t-a"])
    await prefill.released(*prefill.ends or ["t-a: ABORTED"])


async def test_a_decode_worker_that_dies_during_the_transfer_ends_it(prefill: Prefill) -> None:
    prefill.expect("t-a")
    running = asyncio.create_task(prefill.run("a"))
    await prefill.reads()
    await asyncio.to_thread(prefill.receiver.close)
    with pytest.raises(SequenceFailed, match="KV transfer") as failed:
        await running
    assert failed.value.code == "UNAVAILABLE"
    await prefill.released("t-a: UNAVAILABLE")
    async with asyncio.timeout(60):
        while prefill.failures() != {"shm UNAVAILABLE": 1}:
            await asyncio.sleep(0.01)


async def test_no_link_is_a_failure_that_holds_nothing(prefill: Prefill) -> None:
    prefill.reachable = False
    with pytest.raises(SequenceFailed, match="nobody answers"):
        await prefill.run("a")
    await prefill.released()
    assert prefill.failures() == {"none UNAVAILABLE": 1}


async def test_a_request_id_runs_once(prefill: Prefill) -> None:
    prefill.expect("t-a")
    first = asyncio.create_task(prefill.run("a"))
    await prefill.reads()
    with pytest.raises(SequenceFailed, match=r"request_id|transfer"):
        await prefill.run("a")
    first.cancel()
    await asyncio.wait([first])
    await prefill.released(*prefill.ends or ["t-a: ABORTED"])


async def test_the_catalogue_says_what_a_prefill_worker_records(
    prefill: Prefill, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "carrier", "NET/Socket")
    monkeypatch.setattr(Link, "refused", {"shm": "another host"})
    prefill.expect("t-a")
    nobody = Holder(LinkPeer("decode-1", "d-1", prefill.receiver.identity.layout_hash), "127.0.0.1:1")
    await prefill.run("a", holder=nobody)
    async with asyncio.timeout(60):
        while len(spans.get_finished_spans()) < 3:
            await asyncio.sleep(0.01)
    expected = catalogued("prefill")
    assert seen(spans.get_finished_spans(), *expected) == expected
    cut_off = [span.name for span in spans.get_finished_spans() if "tandem.truncated" in attributes(span)]
    assert cut_off == ["kv.fetch"]
    assert [attributes(span)["prefill.tokens"] for span in spans.get_finished_spans() if span.name == "prefill"] == [
        PROMPT
    ]


async def test_a_prefill_that_is_cut_off_says_so_and_claims_no_tokens(
    prefill: Prefill, spans: InMemorySpanExporter
) -> None:
    prefill.expect("t-a")
    task = asyncio.create_task(prefill.run("a"))
    await prefill.reads()
    task.cancel()
    await asyncio.wait([task])
    ended = {span.name: span for span in spans.get_finished_spans()}
    assert all(attributes(ended[name])["tandem.truncated"] for name in ("prefill", "kv.transfer"))
    assert "prefill.tokens" not in attributes(ended["prefill"])
    assert ended["kv.transfer"].status.status_code is StatusCode.ERROR
    assert "kv.transfer.exposed_s" not in attributes(ended["kv.transfer"])
