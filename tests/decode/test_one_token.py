"""Answers that are over before the worker's loop has seen that they began: the worker's real service, a real thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from tandem.engine import Engine, Request, SequenceOutput
from tandem.transfer import LinkRuntime
from tandem.v1 import llm_pb2, worker_pb2
from tandem.worker import EngineThread, WorkerContext, WorkerPorts

ANSWERS = 40


class LateLoop:
    """Keeps the event loop busy from when the engine has a sequence until it is idle again: what the engine reports
    meanwhile, the loop then finds in one turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._add, self._step, self._has_work = engine.add, engine.step, engine.has_work
        self._stepped, self._told = False, threading.Event()
        engine.add, engine.step, engine.has_work = self.add, self.step, self.has_work  # type: ignore[method-assign]

    def add(self, request: Request, **options: Any) -> None:
        self._told.clear()
        self._loop.call_soon_threadsafe(self._told.wait, 30)
        self._add(request, **options)

    def step(self, *computing: Any) -> list[SequenceOutput]:
        outputs = self._step(*computing)
        self._stepped = True
        return outputs

    def has_work(self) -> bool:
        """Asked when the last step's outputs are on their way."""
        if not (work := self._has_work()) and self._stepped:
            self._stepped = False
            self._told.set()
        return work


async def test_answers_of_one_token_end_once_and_are_never_aborted(demo_model: Path) -> None:
    settings = DecodeSettings(model_path=demo_model, worker_id="d0", engine="null", num_blocks=64, host="127.0.0.1")
    engine, numbers = Engine(settings.engine_config()), count()
    thread = EngineThread(engine)
    ports = WorkerPorts(
        engine=thread, registry=None, serve=None, links=LinkRuntime(),  # type: ignore[arg-type]
        new_id=lambda: f"id{next(numbers)}", hostname="127.0.0.1",
    )  # fmt: skip
    worker = DecodeWorker(WorkerContext(settings, "d0", "inc", ports, lambda: None))
    requests = asyncio.Queue[worker_pb2.WorkRequest]()

    async def sent() -> AsyncIterator[worker_pb2.WorkRequest]:
        while True:
            yield await requests.get()

    thread.start(worker.on_events, lambda error: None)
    LateLoop(engine)
    service: Any = worker.servicers[0].implementation
    responses = service.Work(sent(), None)
    assert (await anext(responses)).incarnation == "inc"
    for number in range(ANSWERS):
        sequence = worker_pb2.SequenceSpec(
            request_id=f"r{number}", token_ids=[1, 2, 3 + number], timeout_ms=30_000,
            sampling=llm_pb2.SamplingParams(max_tokens=1, temperature=0.0),
        )  # fmt: skip
        reservation = worker_pb2.Reservation(sequence=sequence, local_prefill=True)
        requests.put_nowait(worker_pb2.WorkRequest(reservations=[reservation]))
    reserved, outputs = list[str](), list[worker_pb2.SequenceOutput]()
    async with asyncio.timeout(60):
        while len(reserved) + len(outputs) < 2 * ANSWERS:
            message = await anext(responses)
            reserved += [answer.request_id for answer in message.reserved]
            assert {output.request_id for output in message.outputs} <= set(reserved)
            outputs += message.outputs
    assert [output.failure.code for output in outputs if output.HasField("failure")] == []
    assert {output.finish_reason for output in outputs} == {llm_pb2.FINISH_REASON_LENGTH}
    assert len(set(reserved)) == ANSWERS
    await responses.aclose()
    await worker.close()
    thread.close()
