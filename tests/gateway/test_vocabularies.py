"""Answers of real workers with tokenizers of four kinds, in every shape: what is said is what the tokens are.

redis <── gateway ── gRPC ──> decode worker of each vocabulary, and a prefill worker of one
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from services.gateway.__main__ import make_gateway
from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem import grammar
from tandem.grammar import Grammars
from tandem.local import RedisServer
from tests.gateway.conftest import eventually, make_settings
from tests.vocabularies import ENDS, NAMES, TEXTS, model_of, rows_of, tokenizer_of
from tests.worker.test_build import running

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object", "properties": {"city name": {"enum": ["New York", "🦜 é"]}, "how many": {"enum": [1, 20]}},
    "required": ["city name", "how many"], "additionalProperties": False,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "tell me"}]
FREE = {"temperature": 1.3, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "ignore_eos": True, "max_tokens": 24}


@dataclass(frozen=True)
class Served:
    """One of the models behind the gateway."""

    name: str
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    grammars: Grammars

    @property
    def special(self) -> set[int]:
        return {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}

    def says(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns what the library adds to a text for these tokens."""
        before = self.tokenizer.encode("x", add_special_tokens=False).ids
        return self.tokenizer.decode([*before, *ids], skip_special_tokens=skip_special_tokens).removeprefix("x")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json={"model": self.name, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with self.http.stream("POST", path, json={"model": self.name, **body, "stream": True}) as answer:
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: {")]
        assert answer.status_code == 200
        return [json.loads(line) for line in lines]

    async def completions(self, **body: Any) -> list[dict[str, Any]]:
        """Returns the choices, which are the same whole and streamed."""
        asked = {"prompt": PROMPT, "seed": 1, "return_token_ids": True, "logprobs": 2, **body}
        whole, events = await asyncio.gather(self.post("/v1/completions", asked), self.events("/v1/completions", asked))
        for choice in whole["choices"]:
            parts = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            for kind, values in (choice["logprobs"] or {}).items():
                assert [one for part in parts for one in (part["logprobs"] or {kind: []})[kind]] == values, kind
        return list(whole["choices"])

    async def chat(self, **body: Any) -> dict[str, Any]:
        """Returns the choice, which is the same whole and streamed."""
        asked = {"messages": MESSAGES, "seed": 1, "return_token_ids": True, "logprobs": True, "top_logprobs": 2, **body}
        whole, events = await asyncio.gather(
            self.post("/v1/chat/completions", asked), self.events("/v1/chat/completions", asked)
        )
        (choice,), parts = whole["choices"], [one for event in events for one in event["choices"]]
        assert "".join(part["delta"].get("content") or "" for part in parts) == (choice["message"]["content"] or "")
        entries = [one for part in parts for one in (part["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]
        calls = [call for part in parts for call in part["delta"].get("tool_calls") or []]
        streamed = "".join(call["function"]["arguments"] for call in calls)
        said = (call["function"]["arguments"] for call in choice["message"].get("tool_calls") or [])
        assert streamed == "".join(said)
        return dict(choice)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Served]]:
    settings = make_settings(redis)
    shared = {"redis_url": redis.url, "namespace": settings.namespace, "dtype": "float32"}
    shared |= {"num_blocks": 256}
    folders = {name: model_of(name, tmp_path_factory.mktemp("models")) for name in NAMES}
    async with AsyncExitStack() as stack:
        for name, folder in folders.items():
            of = {**shared, "model_path": folder, "model_name": name}
            await stack.enter_async_context(running(DecodeSettings(worker_id=f"d-{name}", **of), DecodeWorker))
        of = {**shared, "model_path": folders["spaced"], "model_name": "spaced"}
        await stack.enter_async_context(running(PrefillSettings(worker_id="p", **of), PrefillWorker))
        gateway = await stack.enter_async_context(make_gateway(settings))
        await eventually(lambda: all(gateway.readiness()[1]["models"].get(n, {}).get("ready") for n in NAMES))
        base = f"http://127.0.0.1:{settings.http_port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))
        yield {
            name: Served(name, http, tokenizer_of(name), Grammars(folder, rows_of(name)))
            for name, folder in folders.items()
        }


@pytest.fixture(params=NAMES)
def served(request: pytest.FixtureRequest, cluster: dict[str, Served]) -> Served:
    return cluster[request.param]


def check_logprobs(choice: dict[str, Any], served: Served, begin: int = 0) -> None:
    """Each token begins at its offset, and together they are the text: but for special ones, which are not shown."""
    said, text = choice["logprobs"], choice["text"]
    assert len(said["tokens"]) == len(said["text_offset"]) == len(said["token_logprobs"])
    assert said["text_offset"][0] == begin
    assert all(one <= other for one, other in pairwise(said["text_offset"]))
    for token_id, token, offset in zip(choice["token_ids"], said["tokens"], said["text_offset"], strict=True):
        if token_id not in served.special and "\ufffd" not in token:
            # Bytes before it that turned out to be no character are shown with it.
            assert text[offset:].lstrip("\ufffd").startswith(token)


@pytest.mark.parametrize("body", [{}, {"skip_special_tokens": False}, {"return_tokens_as_token_ids": True}], ids=str)
async def test_a_completion_is_what_its_tokens_are(served: Served, body: dict[str, Any]) -> None:
    for seed in range(3):
        (choice,) = await served.completions(**FREE, **body, seed=seed)
        assert len(choice["token_ids"]) == FREE["max_tokens"]
        said = served.says(choice["token_ids"], body.get("skip_special_tokens", True))
        # Of bytes that are no characters SentencePiece's decoder makes other ones than byte-level ones do.
        assert choice["text"] == said or (served.name == "spaced" and "\ufffd" in said)
        if "return_tokens_as_token_ids" in body:
            assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        else:
            check_logprobs(choice, served)


async def test_its_bytes_are_those_of_its_text(served: Served) -> None:
    for seed in range(2):
        choice = await served.chat(**FREE, seed=seed)
        entries, content = choice["logprobs"]["content"], choice["message"]["content"]
        assert len(entries) == len(choice["token_ids"]) == FREE["max_tokens"]
        shown = zip(choice["token_ids"], entries, strict=True)
        data = b"".join(bytes(one["bytes"]) for token_id, one in shown if token_id not in served.special)
        assert data.decode(errors="replace") == content
        for one in entries:
            for named in (one, *one["top_logprobs"]):
                assert bytes(named["bytes"]).decode(errors="replace") == named["token"]


async def test_rows_beyond_the_words_say_nothing(cluster: dict[str, Served]) -> None:
    served, found = cluster["padded"], 0
    words = served.tokenizer.get_vocab_size()
    for seed in range(2):
        (choice,) = await served.completions(**FREE, seed=seed, prompt_logprobs=2)
        chat = await served.chat(**FREE, seed=seed)
        said = [*zip(choice["token_ids"], choice["logprobs"]["tokens"], strict=True)]
        said += [(i, one["token"]) for i, one in zip(chat["token_ids"], chat["logprobs"]["content"], strict=True)]
        assert {token for i, token in said if i >= words} <= {""}
        assert choice["text"] == served.tokenizer.decode([i for i in choice["token_ids"] if i < words])
        found += sum(i >= words for i in choice["token_ids"])
    assert found, "no seed of this test draws one"


async def test_ids_beyond_the_words_are_taken_as_far_as_the_model_has_rows(served: Served) -> None:
    """Clients send back the tokens of an answer, whatever these say."""
    rows = rows_of(served.name)
    for over in (0, 1):
        last = rows - 1 + over
        for field, value in (
            ("prompt", [5, last]), ("logit_bias", {str(last): 100}), ("stop_token_ids", [last]),
            ("allowed_token_ids", [last]),
        ):  # fmt: skip
            body = {"model": served.name, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, field: value}
            answer = await served.http.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == (400 if over else 200), answer.text
            if over:
                assert answer.json()["error"]["param"] == field
            elif field in ("logit_bias", "allowed_token_ids"):
                assert answer.json()["choices"][0]["token_ids"] == [last, last]
        answer = await served.http.post("/detokenize", json={"model": served.name, "tokens": [5, last]})
        assert answer.status_code == (400 if over else 200)


@pytest.mark.parametrize("asked", ["text", "ids"])
async def test_an_echo_and_its_offsets(served: Served, asked: str) -> None:
    """A prompt of token ids is echoed as the library decodes it from its beginning."""
    ids = served.tokenizer.encode(f"{PROMPT} 🦜").ids
    prompt: Any = f"{PROMPT} 🦜" if asked == "text" else ids
    body = {**FREE, "prompt": prompt, "max_tokens": 9}
    (alone,), (echoed,) = (
        await served.completions(**body),
        await served.completions(**body, echo=True, prompt_logprobs=1),
    )
    assert echoed["text"] == f"{PROMPT} 🦜" + alone["text"]
    assert echoed["token_ids"] == alone["token_ids"]
    said = echoed["logprobs"]
    assert said["tokens"][len(ids) :] == alone["logprobs"]["tokens"]
    assert said["text_offset"][len(ids) :] == [len(PROMPT) + 2 + at for at in alone["logprobs"]["text_offset"]]
    for token_id, token, offset in zip(ids, said["tokens"], said["text_offset"], strict=False):
        if token_id not in served.special and "\ufffd" not in token:
            begins = token if offset or served.name != "spaced" else token.removeprefix(" ")
            assert echoed["text"][offset:].startswith(begins)
    named = [one[str(i)]["decoded_token"] for i, one in zip(ids[1:], echoed["prompt_logprobs"][1:], strict=True)]
    assert named == said["tokens"][1 : len(ids)]


async def test_an_answer_continues_its_prompt(served: Served) -> None:
    """Its first token has its space."""
    word = next(i for t, i in sorted(served.tokenizer.get_vocab().items()) if t[0] in "▁Ġ" and t[1:].isalpha())
    only = {**FREE, "max_tokens": 2, "allowed_token_ids": [word]}
    text = served.says([word])
    assert text.startswith(" ")
    (choice,) = await served.completions(**only)
    assert choice["text"] == 2 * text
    chat = await served.chat(**only)
    assert chat["message"]["content"] == 2 * text


async def test_a_stop_string_across_tokens(served: Served) -> None:
    (free,) = await served.completions(**FREE)
    text, at = free["text"], free["logprobs"]["text_offset"]
    cuts = [one for one, other in pairwise(sorted(set(at))) if "\ufffd" not in text[one - 2 : other + 2]]
    for cut in cuts[2::7]:
        stop = text[cut - 1 : cut + 2]
        (stopped,) = await served.completions(**FREE, stop=[stop])
        assert (stopped["text"], stopped["stop_reason"]) == (text[: text.index(stop)], stop)
        (shown,) = await served.completions(**FREE, stop=[stop], include_stop_str_in_output=True)
        assert shown["text"] == text[: text.index(stop)] + stop


async def test_each_choice_is_what_it_is_alone(served: Served) -> None:
    together = await served.completions(**FREE, n=2, seed=5)
    for i, choice in enumerate(together):
        (alone,) = await served.completions(**FREE, seed=5 + i)
        assert (choice["text"], choice["token_ids"]) == (alone["text"], alone["token_ids"])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json": SCHEMA}, None),
        ({"regex": "🦜 é{2}[a-c]{3}"}, "🦜 éé[a-c]{3}"),
        ({"choice": [text for text in TEXTS if text.strip()]}, "|".join(map(re.escape, TEXTS))),
        ({"grammar": 'start: "<|middle|>" /[0-9]{2}/ " </s>"'}, r"<\|middle\|>[0-9]{2} </s>"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_completion_follows_its_form(served: Served, asked: dict[str, Any], expected: str | None) -> None:
    body = {**FREE, "ignore_eos": False, "max_tokens": 90, "structured_outputs": asked}
    for temperature in (0.0, 1.3, 2.0):
        (choice,) = await served.completions(**{**body, "temperature": temperature})
        assert choice["finish_reason"] == "stop"
        if expected is None:
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
        else:
            assert re.fullmatch(expected, choice["text"])
        assert choice["text"] == served.says(choice["token_ids"][:-1])
        check_logprobs(choice, served)


async def test_a_chat_follows_its_form(served: Served) -> None:
    choice = await served.chat(response_format=FORM, max_tokens=90)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    choice = await served.chat(response_format={"type": "json_object"}, max_tokens=40, temperature=1.3, top_p=1.0)
    guide = served.grammars.start(grammar.of_json_schema({"type": "object"}))
    assert not guide.follow([i for i in choice["token_ids"] if i != ENDS[served.name]])
    assert choice["message"]["content"] == served.says(choice["token_ids"])


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=str)
async def test_a_call_is_forced(served: Served, tool_choice: Any) -> None:
    body = {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False, "max_tokens": 120}
    for temperature in (0.0, 1.3):
        choice = await served.chat(**body, temperature=temperature)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert choice["message"]["content"] is None


async def test_texts_and_tokens(served: Served) -> None:
    for text in TEXTS:
        found = await served.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert found["tokens"] == served.tokenizer.encode(text).ids
        back = await served.post("/detokenize", {"tokens": found["tokens"]})
        assert back["prompt"] == served.tokenizer.decode(found["tokens"], skip_special_tokens=False)


async def test_bad_words_are_these_words(served: Served) -> None:
    """A word is not chosen behind a space, nor without one."""
    (free,) = await served.completions(**FREE)
    words = [token for token in free["logprobs"]["tokens"] if token.strip().isalpha() and len(token) > 1]
    behind, within = (next(w for w in words if w.startswith(" ") is spaced) for spaced in (True, False))
    (without,) = await served.completions(**FREE, bad_words=[behind.strip(), within])
    assert not {behind, within, f" {within}", behind.strip()} & set(without["logprobs"]["tokens"])


async def test_every_door_says_the_same(served: Served) -> None:
    said = {"temperature": 0.0, "max_tokens": 12}
    text = (await served.chat(**said))["message"]["content"]
    responses = {"input": MESSAGES, "temperature": 0.0, "max_output_tokens": 16}
    whole = await served.post("/v1/responses", responses)
    spoken = "".join(part["text"] for item in whole["output"] for part in item.get("content", []))
    assert spoken.startswith(text)
    events = await served.events("/v1/responses", responses)
    assert "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta") == spoken
    messages = {"messages": MESSAGES, **said}
    assert (await served.post("/v1/messages", messages))["content"] == [{"type": "text", "text": text}]
    deltas = [one["delta"] for one in await served.events("/v1/messages", messages) if "delta" in one]
    assert "".join(delta.get("text", "") for delta in deltas) == text
