"""Clients of completions and chats that do as little as they can: kept connections; bytes stamped, read afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.frontends.pace import BackendPace
from benchmarks.load import PeerError, events
from benchmarks.results import percentile

END = b"0\r\n\r\n"
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
PROMPT_WORDS = 16
BOUND_S = 120.0


@dataclass(frozen=True, slots=True)
class Stamped:
    """An answer as its bytes came."""

    seed: int
    sent: float
    pieces: Sequence[tuple[float, bytes]]

    def texts(self) -> Iterator[tuple[float, str]]:
        """When what text came."""
        for at, event in events(self.pieces):
            for choice in event.get("choices", ()):
                if choice["text"]:
                    yield at, choice["text"]


class KeptConnection(asyncio.Protocol):
    """One answer after the other."""

    def __init__(self, pace: BackendPace) -> None:
        self._pace = pace
        self._pieces: list[tuple[float, bytes]] = []
        self._tail = b""
        self._answer: asyncio.Future[list[tuple[float, bytes]]] | None = None
        self._transport: asyncio.Transport | None = None

    def ask(self, request: bytes) -> asyncio.Future[list[tuple[float, bytes]]]:
        assert self._transport is not None
        self._pieces = []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        self._pace.received(data)
        self._tail = (self._tail + data)[-len(END) :]
        if self._answer is None or self._answer.done():
            return
        if self._tail == END:
            self._answer.set_result(self._pieces)
        elif len(self._pieces) == 1 and not data.startswith(b"HTTP/1.1 200"):
            self._answer.set_exception(PeerError(data.decode(errors="replace")[:500]))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeerError("the connection ended within an answer"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class Measured:
    """One load as its clients saw it."""

    answers: Sequence[Stamped]
    seconds: float

    def ttft_ms(self, percent: float) -> float:
        """From a request until the first piece with text."""
        return 1000 * percentile([next(a.texts())[0] - a.sent for a in self.answers], percent)

    def num_tokens(self) -> int:
        return sum(len(text) for answer in self.answers for _, text in answer.texts())

    def tokens_an_event(self) -> float:
        return self.num_tokens() / sum(1 for answer in self.answers for _ in answer.texts())

    def delays_ms(self, pace: BackendPace) -> list[float]:
        """The delay of each token but an answer's first, from when its backend wrote it."""
        found = []
        for answer in self.answers:
            written, index = pace.written[answer.seed], 0
            for at, text in answer.texts():
                found += [at - left for left in written[max(index, 1) : index + len(text)]]
                index += len(text)
        return [1000 * delay for delay in found]


class StreamLoad:
    """`count` requests of `tokens` tokens, `at_once` at any time, through the server at host:port."""

    def __init__(self, port: int, model: str, pace: BackendPace) -> None:
        self._port, self._model, self._pace = port, model, pace
        self._dice = random.Random(1)

    async def run(self, count: int, tokens: int, at_once: int, chat: bool = False) -> Measured:
        """
        Args:
            chat: the requests are chats of two messages.

        Raises:
            PeerError: an answer that is none.
            TimeoutError
        """
        self._pace.reset()
        loop = asyncio.get_running_loop()
        connections = [
            (await loop.create_connection(lambda: KeptConnection(self._pace), "127.0.0.1", self._port))[1]
            for _ in range(at_once)
        ]
        waiting = iter([(seed, self._request(seed, tokens, chat)) for seed in self._pace.seeds(count)])
        answers: list[Stamped] = []

        async def client(connection: KeptConnection) -> None:
            for seed, request in waiting:
                sent = time.perf_counter()
                answers.append(Stamped(seed, sent, await connection.ask(request)))

        start = time.perf_counter()
        try:
            async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
                for connection in connections:
                    group.create_task(client(connection))
        finally:
            for connection in connections:
                connection.close()
        return Measured(answers, time.perf_counter() - start)

    def _request(self, seed: int, tokens: int, chat: bool) -> bytes:
        text = " ".join(self._dice.choices(WORDS, k=PROMPT_WORDS))
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        body = json.dumps(
            {
                "model": self._model, **({"messages": messages} if chat else {"prompt": text}),
                "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "seed": seed,
            }
        ).encode()  # fmt: skip
        path = "/v1/chat/completions" if chat else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
