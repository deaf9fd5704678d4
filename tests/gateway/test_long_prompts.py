"""A long prompt delays no other: refused by its characters where it cannot fit, else tokenized beside the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from services.gateway.text import Batches, Tokenizer, UnreadText
from services.gateway.text.batches import BATCH
from tandem.local import RedisServer
from tandem.vocabulary import load_tokenizer
from tests.gateway.conftest import lonely_gateway, make_settings
from tests.gateway.peers import MODEL
from tests.gateway.tiny_model import byte_level_tokenizer

CHARACTERS = 12_000_000  # half a minute to tokenize
CONTEXT = 512  # of the tiny model


@pytest.fixture
async def client(model_folder: Path, redis: RedisServer) -> AsyncIterator[httpx.AsyncClient]:
    """Without any worker: nothing is refused for what a worker says."""
    async with lonely_gateway(make_settings(redis)) as gateway:
        base = f"http://127.0.0.1:{gateway.settings.http_port}"
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x" * CHARACTERS}),
        ("completions", {"prompt": ["x", "x" * CHARACTERS]}),
        ("completions", {"prompt": [5] * 2_000_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * CHARACTERS}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000}] * 1000}),
    ],
)
async def test_one_that_cannot_fit_is_refused_unread(client: httpx.AsyncClient, path: str, body: object) -> None:
    assert isinstance(body, dict)
    answer = await client.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_bound_lets_every_prompt_in_that_fits(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """As many of the longest token as the context has room for."""
    ids = range(tokenizer.vocab_size)
    longest = max((tokenizer.token_bytes(i).decode("latin-1") for i in ids), key=len)
    assert len(longest) == tokenizer.longest_token
    for count, status in ((CONTEXT - 1, 503), (CONTEXT + 1, 400)):  # 503: there is no worker
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": longest * count, "max_tokens": 1})
        assert answer.status_code == status, answer.text[:200]


async def test_prompts_that_are_too_many_are_refused_unread(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": ["x"] * 1_000_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


async def test_an_error_does_not_repeat_a_long_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "x" * 1_000_000, "prompt": "x"})
    assert answer.status_code == 404
    assert len(answer.content) < 5000


async def test_the_event_loop_goes_on_while_a_text_is_tokenized(tokenizer: Tokenizer) -> None:
    encoding = asyncio.create_task(tokenizer.encode("the quick brown fox " * 50_000, add_special_tokens=False))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) > 50_000
    assert turns > 10


@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_long_texts_at_once_are_each_told_their_own_tokens(
    tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    texts = ["the quick brown fox " * count for count in (300, 301, 5000, 302, 10, 303)]
    found = await asyncio.gather(*(tokenizer.encode(text, add_special_tokens) for text in texts))
    assert [tokenizer.decode(ids) for ids in found] == texts


class Recorder:
    """Encodes each text as its length, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        lengths = [len(text) for text in texts]
        self.asked.append(lengths)
        return [[length] for length in lengths]


async def test_what_comes_while_a_batch_is_read_is_the_next_batch() -> None:
    encode = Recorder()
    batches = Batches(encode)
    half = BATCH // 2
    texts = ["x" * length for length in (100, 200, half, 300, half, 400)]
    tasks = [asyncio.create_task(batches.encode(text)) for text in texts]
    await asyncio.sleep(0)
    tasks[3].cancel()  # the loop has not seen the first batch's end yet
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [one for one in found if isinstance(one, list)] == [[100], [200], [half], [half], [400]]
    assert encode.asked == [[100], [200, half], [half, 400]]
    assert await batches.encode("y" * 500) == [500]
    assert await batches.encode("y" * BATCH) == [BATCH]
    assert encode.asked[3:] == [[500], [BATCH]]


async def test_very_long_texts_take_no_thread_of_anything_else() -> None:
    """Neither of shorter texts nor of other work, such as grammars."""
    goes_on = threading.Event()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if len(texts[0]) >= BATCH:
            goes_on.wait(60)
        return [[len(text)] for text in texts]

    batches = Batches(encode)
    tasks = [asyncio.create_task(batches.encode("x" * BATCH)) for _ in range(100)]
    try:
        async with asyncio.timeout(20):
            await asyncio.sleep(0)
            assert await batches.encode("x" * 5000) == [5000]
            assert await asyncio.to_thread(len, "x") == 1
    finally:
        goes_on.set()
        assert await asyncio.gather(*tasks) == [[BATCH]] * 100


async def test_an_error_of_a_batch_is_its_requests_and_no_later_ones() -> None:
    batches = Batches(lambda texts: [[1 // (len(text) - 7)] for text in texts])
    with pytest.raises(ZeroDivisionError):
        await batches.encode("x" * 7)
    assert await batches.encode("x" * 8) == [1]


class Panic(BaseException):
    """As the library's, which is no Exception."""


async def test_a_text_that_cannot_be_encoded_fails_no_other_of_its_batch() -> None:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        if any(len(text) == 7 for text in texts):
            raise Panic("index out of bounds")
        return [[len(text)] for text in texts]

    batches = Batches(encode)
    tasks = [asyncio.create_task(batches.encode("x" * length)) for length in (5, 6, 7, 8)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[0], found[1], found[3]] == [[5], [6], [8]]
    assert isinstance(found[2], UnreadText)
    assert "index out of bounds" in str(found[2])


async def test_no_prompt_is_padded_to_anothers_length_or_cut(tmp_path: Path) -> None:
    """A tokenizer that was saved after training may ask for it."""
    made = byte_level_tokenizer()
    made.enable_padding()
    made.enable_truncation(100)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(load_tokenizer(tmp_path))
    texts = ["the quick brown fox " * count for count in (300, 400, 500)]
    found = await asyncio.gather(*(tokenizer.encode(text, True) for text in texts))
    assert [tokenizer.decode(ids) for ids in found] == texts
