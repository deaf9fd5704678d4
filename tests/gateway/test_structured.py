"""The structure asked of an answer: read at both doors, checked before anything is reserved, a grammar for workers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc import aio

from services.gateway.__main__ import make_gateway
from services.gateway.generation import grammars
from services.gateway.text import Tokenizer
from tandem import grammar
from tandem.containment.sandbox import Sandbox
from tandem.containment.sandboxed import Bounds, MiB
from tandem.local import RedisServer
from tandem.v1 import llm_pb2
from tests.gateway.conftest import eventually, linked_pair, make_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_fields import service, unary
from tests.gateway.test_http import CHAT, TEXTUAL

__all__ = ["service"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
LARK = 'start: "a" | "b"'

SAME: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json": json.dumps(SCHEMA)},
        grammar.of_json_schema(SCHEMA),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},  # a name is not asked for
        {"json": json.dumps(SCHEMA)},
        grammar.of_json_schema(SCHEMA),
    ),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}, grammar.of_json_schema({"type": "object"})),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": json.dumps(SCHEMA)}, grammar.of_json_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}, grammar.of_regex("a+")),
    (
        {"structured_outputs": {"choice": ["x", "y"]}},
        {"choice": llm_pb2.Choices(texts=["x", "y"])},
        grammar.of_choice(["x", "y"]),
    ),
    ({"structured_outputs": {"grammar": LARK}}, {"grammar": LARK}, grammar.of_grammar(LARK)),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
        {"structural_tag": json.dumps(TAGS)},
        grammar.of_tags(TAGS["structures"], ["<f"]),  # type: ignore[arg-type]
    ),
    ({"guided_json": SCHEMA}, {"json": json.dumps(SCHEMA)}, grammar.of_json_schema(SCHEMA)),
    ({"guided_regex": "a+"}, {"regex": "a+"}, grammar.of_regex("a+")),
    ({"guided_choice": ["x"]}, {"choice": llm_pb2.Choices(texts=["x"])}, grammar.of_choice(["x"])),
    ({"guided_grammar": LARK}, {"grammar": LARK}, grammar.of_grammar(LARK)),
]


@pytest.mark.long
@pytest.mark.parametrize(("over_http", "over_grpc", "expected"), SAME, ids=lambda value: str(value)[:40])
async def test_workers_get_the_same_grammar(
    http: httpx.AsyncClient, service: Any, peers: Peers, over_http: dict[str, Any], over_grpc: dict[str, Any],
    expected: str,
) -> None:  # fmt: skip
    for path, body in (("/v1/completions", TEXTUAL), ("/v1/chat/completions", CHAT)):
        answer = await http.post(path, json={**body, **over_http, "ignore_eos": True, "max_tokens": 9})
        assert answer.status_code == 200, answer.text
    sampling = llm_pb2.SamplingParams(max_tokens=9, grammar="not this")
    await unary(service, structured_outputs=llm_pb2.StructuredOutputs(**over_grpc), sampling=sampling)
    assert [spec.sampling.grammar for spec in peers.decode.seen] == [expected] * 3
    assert peers.prefill.seen[0].sampling.grammar == expected
    assert list(peers.decode.seen[0].sampling.stop_token_ids) == [0], "the end of the grammar ends the answer"


async def test_plain_text_has_none(http: httpx.AsyncClient, service: Any, peers: Peers) -> None:
    await http.post("/v1/chat/completions", json={**CHAT, "response_format": {"type": "text"}})
    await unary(service, sampling=llm_pb2.SamplingParams(max_tokens=9, grammar="not this"))
    assert [spec.sampling.grammar for spec in peers.decode.seen] == ["", ""]


def rules(count: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a"'])


def references(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "null"}}}


def tags(schema: Any) -> str:
    return json.dumps({**TAGS, "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}]})


def tool(schema: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


DEEP: Any = {}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
    ({"response_format": "json"}, "response_format", "object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "response_format.json_schema.schema",
        "objekt",
    ),
    (
        {"guided_json": {"properties": {"a": {"items": {"properties": {"b": {"type": "intger"}}}}}}},
        "guided_json.properties.a.items.properties.b",
        "intger",
    ),
    ({"guided_json": {"anyOf": [{}, {"uniqueItems": True}]}}, "guided_json.anyOf[1]", "uniqueItems"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "7"}, "guided_json", "an object"),
    ({"guided_json": DEEP}, "guided_json", "nested deeper than 64"),
    ({"guided_json": {"description": "x" * 300_000}}, "guided_json", "at most"),
    ({"guided_regex": "(["}, "guided_regex", "unclosed"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"structured_outputs": {"choice": ["x"] * 1025}}, "structured_outputs.choice", "at most 1024"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "strings"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "nothing"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structures"),
    (
        {"structured_outputs": {"structural_tag": json.dumps({**TAGS, "triggers": ["x"]})}},
        "structured_outputs.structural_tag",
        "trigger",
    ),
    # What ended the gateway, or workers: llguidance recurses without a bound.
    ({"guided_grammar": rules(3000)}, "guided_grammar", "1000 deep"),
    ({"guided_json": references(2000)}, "guided_json", "deeper than 1000"),
    ({"guided_grammar": f"start: %json {json.dumps(references(2000))}"}, "guided_grammar", "deeper than 1000"),
    (
        {"structured_outputs": {"structural_tag": tags(references(2000))}},
        "structured_outputs.structural_tag.structures[0].schema",
        "deeper than 1000",
    ),
    (
        {"tools": [tool({}), tool(references(2000), name="g", strict=True)], "tool_choice": "required"},
        "tools[1].function.parameters",
        "deeper than 1000",
    ),
    # What was an error of the server.
    ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json", "nested"),
    ({"guided_json": "[" * 200_000}, "guided_json", "nested"),
    (
        {"structured_outputs": {"structural_tag": "[" * 200_000}},
        "structured_outputs.structural_tag",
        "nested",
    ),
    ({"guided_json": '{"const": 1e999}'}, "guided_json", "number"),
    ({"guided_json": {"properties": "x"}}, "guided_json", "object"),
    ({"guided_json": {"definitions": "x", "type": 5}}, "guided_json", "type"),
    ({"guided_json": {"patternProperties": "x", "type": 5}}, "guided_json", "type"),
    ({"guided_json": {"$defs": [1], "type": "nope"}}, "guided_json", "nope"),
    ({"guided_json": '{"properties": {"\\ud800": {"type": "nope"}}}'}, "guided_json", "hex escape"),
    # What no text follows.
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no answer"),
    ({"guided_json": {"anyOf": [{"$ref": "#"}]}}, "guided_json", "no answer"),
    ({"guided_grammar": "start: start"}, "guided_grammar", "no answer"),
    # What failed at its first token, after a second of an engine's step.
    # Too large, or on a slow machine too long in the making.
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "guided_regex: "),
    ({"guided_regex": "a{1000000}"}, "guided_regex", "too large"),
    ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "no answer"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "only one"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    model_folder: Path, redis: RedisServer, tokenizer: Tokenizer
) -> AsyncIterator[tuple[httpx.AsyncClient, Peers]]:
    """A gateway for all that is refused: each would start a helper process of its own."""
    settings = make_settings(redis)
    async with linked_pair(settings, tokenizer) as peers, make_gateway(settings) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as client:
            yield client, peers


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("wrong", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_no_answer_could_follow_is_refused(
    shared: tuple[httpx.AsyncClient, Peers], wrong: dict[str, Any], param: str, words: str
) -> None:
    client, peers = shared
    answer = await client.post("/v1/chat/completions", json={**CHAT, **wrong})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not peers.decode.seen
    assert await peers.reserved() == 0


async def test_grpc_names_the_place(service: Any) -> None:
    asked = llm_pb2.StructuredOutputs(json=json.dumps({"properties": {"a": {"type": "intger"}}}))
    request = llm_pb2.GenerateRequest(model=MODEL, prompt="x", structured_outputs=asked)
    with pytest.raises(aio.AioRpcError) as refused:
        await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_outputs.json.properties.a" in (refused.value.details() or "")


async def test_a_grammar_that_crashes_or_exhausts_the_helper_is_the_clients_mistake(
    http: httpx.AsyncClient, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would that no bound foresees: here one with less stack, time or memory than usual."""
    for bounds, said, words in (
        (Bounds(stack_bytes=MiB), {"guided_grammar": rules(900)}, "SIGSEGV"),
        (Bounds(cpu_s=0.05), {"guided_regex": "(a{1000}){1000}"}, "CPU time"),
        (Bounds(memory_bytes=MiB), {"guided_regex": "a{1000000}"}, "memory|SIGABRT"),
    ):
        monkeypatch.setattr(grammars, "BOUNDS", bounds)
        answer = await http.post("/v1/completions", json={**TEXTUAL, **said})
        assert answer.status_code == 400, answer.text
        assert [answer.json()["error"]["param"]] == list(said)
        assert re.search(words, answer.json()["error"]["message"])
    assert not peers.decode.seen
    monkeypatch.undo()
    answer = await http.post("/v1/completions", json={**TEXTUAL, "guided_grammar": rules(899)})
    assert answer.status_code == 200, answer.text


async def test_a_schema_is_checked_once_however_many_ask_for_it(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    call = Sandbox.call

    async def counted(self: Sandbox, *args: Any, **options: Any) -> Any:
        calls.append(args)
        return await call(self, *args, **options)

    monkeypatch.setattr(Sandbox, "call", counted)
    for guided, status in (({"guided_regex": "once+"}, 200), ({"guided_regex": "once("}, 400)):
        asked = (http.post("/v1/completions", json={**TEXTUAL, **guided, "max_tokens": 3}) for _ in range(20))
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {status}
    assert len(calls) == 2
