"""A refused body leaves with its answer: nothing holds a large one until Python looks for cyclic garbage."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc import aio

from services.gateway import Gateway
from services.gateway.admission import Admission
from services.gateway.errors import Overloaded
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL

SIZE = 2 * 2**20
SMALL_SIZE = 200_000  # read on the event loop
MARK = "nobody-else-says-this"

# The field of the prompt, by parts of paths.
NAMES = {"chat": "messages", "messages": "messages", "responses": "input", "embed": "input", "rerank": "query"}


def said(path: str, value: Any) -> dict[str, Any]:
    name = next((name for part, name in NAMES.items() if part in path), "prompt")
    return {"model": MODEL, name: [{"role": "user", "content": value}] if name == "messages" else value}


BAD: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "too-long": lambda path, text: said(path, text),
    "a-wrong-field": lambda path, text: said(path, "x") | {"stream": text, "add_special_tokens": text, "top_n": text},
    "an-unknown-model": lambda path, text: said(path, "x") | {"model": text},
    "an-unknown-role": lambda path, text: said(path, "x") | {"messages": [{"role": text, "content": "x"}]},
}
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
    "/v1/messages/count_tokens", "/tokenize",
)  # fmt: skip


@pytest.fixture
def no_search() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def holders() -> list[str]:
    """Returns what holds a large part of a body, of all that Python's collector could find."""
    found = []
    for one in gc.get_objects():
        for held in gc.get_referents(one):
            if isinstance(held, bytes | bytearray | str) and len(held) >= SMALL_SIZE and has_mark(held):
                found.append(f"{type(one).__name__}: {str(one)[:200]}")
    return found


def has_mark(held: bytes | bytearray | str) -> bool:
    return MARK in held if isinstance(held, str) else MARK.encode() in held


async def gone(name: str) -> None:
    """The server forgets a request once its connection waits for the next one."""
    try:
        await eventually(lambda: not holders(), 3.0)
    except TimeoutError:
        raise AssertionError((name, holders())) from None


async def posted(port: int, path: str, body: bytes) -> bytes:
    """Returns the answer's head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)))
    writer.write(body)
    try:
        return await reader.readuntil(b"\r\n")
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("path", PATHS)
async def test_of_http(gateway: Gateway, path: str) -> None:
    for size in (SMALL_SIZE, SIZE):
        for name, make in BAD.items():
            body = json.dumps(make(path, MARK * (size // len(MARK) + 1))).encode()
            answer = await posted(gateway.settings.http_port, path, body)
            del body
            assert answer[9:12] in (b"200", b"400", b"404", b"413"), (name, answer)
            await gone(f"{name} of {size} bytes")


def full(*_: object, **__: object) -> Overloaded:
    return Overloaded("it would come too late")


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("path", PATHS[:4])
async def test_of_http_while_others_wait(gateway: Gateway, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_too_late", full)
    # What is beside the prompt, as a prompt would be too long.
    asked = said(path, "x") | {"max_tokens": 5, "metadata": {"x": "y"}, "nobody_reads_it": MARK * (SMALL_SIZE // 20)}
    answer = await posted(gateway.settings.http_port, path, json.dumps(asked).encode())
    del asked
    assert answer[9:12] in (b"429", b"529"), answer
    await gone("while others wait")


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("size", [SMALL_SIZE, SIZE])
@pytest.mark.parametrize("field", ["prompt", "tenant"])
async def test_of_grpc(gateway: Gateway, size: int, field: str) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        service: Any = llm_pb2_grpc.LLMServiceStub(channel)
        request = llm_pb2.GenerateRequest(model=MODEL, **{"prompt": "x", field: MARK * (size // len(MARK) + 1)})
        for call in (
            service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request)),
            service.Generate(request),
        ):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        del call, request
        await gone(field)
