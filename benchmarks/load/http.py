"""The load: streams of /v1/completions, read with as little work as a client can do.

The client runs on the cores it measures. So while answers arrive it only stamps and keeps the bytes; they are read
when all answers of the load are over.

1. write one POST, on a connection of its own
2. stamp what arrives: (seconds, bytes) -> Unread
3. undo HTTP's chunking, split into server-sent events, count each event's tokens -> Answer
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.results import Arrival, TimedAnswer

READ_BYTES = 1 << 18


class PeerError(RuntimeError):
    """The server did not answer as an OpenAI server does; says what it answered."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids in, so many tokens out, and its arrival time in seconds after the load's start."""

    prompt: Sequence[int]
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Unread:
    """An answer as its bytes came."""

    url: str
    job: Job
    sent: float
    stamped: Sequence[tuple[float, bytes]]

    def read(self) -> TimedAnswer:
        """Raises PeerError: another status than 200, an error event, or fewer tokens than asked for."""
        answer = read_answer(self.sent, self.stamped)
        if round(answer.tokens) != self.job.max_tokens:
            raise PeerError(f"{self.url} answered {answer.tokens:g} tokens where {self.job.max_tokens} were asked for")
        return answer


@dataclass(frozen=True, slots=True)
class LoadClient:
    """Speaks to one OpenAI server. `extra` is added to each body (a server's own fields)."""

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0

    async def send(self, job: Job) -> TimedAnswer:
        """Streams one greedy answer of exactly `job.max_tokens` tokens.

        Raises:
            PeerError: as Unread.read.
            TimeoutError, OSError
        """
        return (await self.ask(job)).read()

    async def ask(self, job: Job) -> Unread:
        """As `send`, but the answer is still to be read, and checked."""
        async with asyncio.timeout(self.timeout_s):
            sent = time.perf_counter()
            return Unread(self.url, job, sent, await self._exchange(self._body(job)))

    def _body(self, job: Job) -> bytes:
        return json.dumps(
            {
                "model": self.model, "prompt": list(job.prompt), "max_tokens": job.max_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **self.extra,
            }
        ).encode()  # fmt: skip

    async def _exchange(self, body: bytes) -> list[tuple[float, bytes]]:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=READ_BYTES)
        try:
            head = f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            stamped = []
            while data := await reader.read(READ_BYTES):
                stamped.append((time.perf_counter(), data))
            return stamped
        finally:
            writer.close()


async def closed_loop(client: LoadClient, jobs: Sequence[Job], concurrency: int) -> list[TimedAnswer]:
    """Keeps `concurrency` requests running until all are answered; answers in the order of `jobs`."""
    return _read(await _ask_all(client, jobs, concurrency))


async def open_loop(client: LoadClient, jobs: Sequence[Job]) -> list[TimedAnswer]:
    """Sends each request at its own time, whether or not others are answered; answers in the order of `jobs`."""
    return await in_slots(client, jobs, len(jobs))


async def in_slots(client: LoadClient, jobs: Sequence[Job], slots: int) -> list[TimedAnswer]:
    """Continuous batching's load: open loop, but a request waits until one of `slots` is free."""
    free, start = asyncio.Semaphore(slots), time.perf_counter()

    async def one(job: Job) -> Unread:
        await asyncio.sleep(start + job.at - time.perf_counter())
        async with free:
            return await client.ask(job)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(job)) for job in jobs]
    return _read([task.result() for task in tasks])


async def in_batches(client: LoadClient, jobs: Sequence[Job], size: int) -> list[TimedAnswer]:
    """Static batching's load: `size` requests at once when all of them have come and the batch before is answered."""
    answers, start = list[Unread](), time.perf_counter()
    for first in range(0, len(jobs), size):
        batch = jobs[first : first + size]
        await asyncio.sleep(start + max(job.at for job in batch) - time.perf_counter())
        answers += await _ask_all(client, batch, size)
    return _read(answers)


async def _ask_all(client: LoadClient, jobs: Sequence[Job], concurrency: int) -> list[Unread]:
    waiting = iter(enumerate(jobs))
    answers: dict[int, Unread] = {}

    async def stream() -> None:
        for index, job in waiting:
            answers[index] = await client.ask(job)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(stream())
    return [answers[index] for index in range(len(jobs))]


def _read(answers: Sequence[Unread]) -> list[TimedAnswer]:
    return [answer.read() for answer in answers]


def read_answer(sent: float, stamped: Sequence[tuple[float, bytes]]) -> TimedAnswer:
    """An Answer from the bytes of one HTTP response, stamped as they were read. Raises PeerError."""
    found, usage = [], None
    for at, event in events(stamped):
        if "error" in event:
            raise PeerError(f"the stream ended in an error: {event['error']}")
        usage = event.get("usage") or usage
        found += [(at, choice) for choice in event.get("choices", ())]
    if usage is None or not found:
        raise PeerError("the stream ended without tokens and usage")
    arrivals = _counted(found, usage["completion_tokens"])
    return TimedAnswer(sent, arrivals, usage["prompt_tokens"])


def _counted(found: Sequence[tuple[float, dict[str, Any]]], total: int) -> tuple[Arrival, ...]:
    """Tokens of each chunk: its `token_ids` where the server sends them, else an equal share of the usage."""
    if any(choice.get("token_ids") for _, choice in found):
        return tuple(Arrival(at, len(ids)) for at, choice in found if (ids := choice.get("token_ids")))
    if len(found) > total:
        found = [(at, choice) for at, choice in found if choice.get("text")]
    return tuple(Arrival(at, total / len(found)) for at, _ in found)


def events(stamped: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    pending = b""
    for at, data in _body(stamped):
        *whole, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            text = event.removeprefix(b"data:").strip()
            if event.startswith(b"data:") and text != b"[DONE]":
                yield at, json.loads(text)


def _body(stamped: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The response's body without head and chunking, as it came in."""
    buffer, chunked = b"", None
    for at, data in stamped:
        buffer += data
        if chunked is None:
            head, end, rest = buffer.partition(b"\r\n\r\n")
            if not end:
                continue
            _check_status(head, rest)
            chunked, buffer = b"transfer-encoding: chunked" in head.lower(), rest
        whole, buffer = _unchunked(buffer) if chunked else (buffer, b"")
        yield at, whole
    if chunked is None:
        raise PeerError(f"the connection ended before an answer: {buffer[:200]!r}")


def _check_status(head: bytes, rest: bytes) -> None:
    if head.split(b" ", 2)[1] != b"200":
        raise PeerError(f"{head.splitlines()[0].decode()}: {rest[:500].decode(errors='replace')}")


def _unchunked(buffer: bytes) -> tuple[bytes, bytes]:
    """(the content of all whole HTTP chunks, what is left)."""
    content = b""
    while True:
        size, end, rest = buffer.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16) if end else 0
        if not length or len(rest) < length + 2:
            return content, buffer
        content, buffer = content + rest[:length], rest[length + 2 :]
