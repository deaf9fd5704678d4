"""Schemas, regexes, grammars, tags and tools, mutated from real ones, at both doors: each is followed or refused.

What the gateway lets through is compiled here as a worker would, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from canitoolcall.fixtures import load_fixtures
from grpc import aio
from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY

from services.gateway import Gateway
from tandem.grammar import Grammars, InvalidGrammar
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.fuzzing import collected
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_json_schema import FOLLOWED, REFUSED
from tests.gateway.test_structured import LARK, references, rules

pytestmark = pytest.mark.long
FAMILIES = ("qwen3-hermes", "qwen3-xml", "llama", "mistral")
TOOLS = list(
    {json.dumps(tool): tool for case in load_fixtures(None, families=FAMILIES) for tool in case.tools}.values()
)
SCHEMAS: list[Any] = [
    *(schema for schema, *_ in (*FOLLOWED, *REFUSED)),
    *(tool["function"].get("parameters") or {} for tool in TOOLS),
    *(REGISTRY.contents(uri) for uri in sorted(REGISTRY)),
    references(40),
]
REGEXES = [r"[a-z]+@[a-z]+\.com", r"\d{4}-\d{2}-\d{2}", r"(x|yz)*$", r"\p{L}{2,8}", r"(a|b(c|d{1,3})+)?"]
GRAMMARS = [
    LARK,
    'root ::= "yes" | "no" | number\nnumber ::= [0-9]+ ("." [0-9]+)?',
    'start: expr\nexpr: term ("+" term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/\n%ignore /[ ]+/',
    'start: "a" %json {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}} "z"',
    rules(40),
]
KEYWORDS = sorted({key for schema in SCHEMAS if isinstance(schema, dict) for key in schema})
# Where JSON has no word for it: stands in a body for a number too large.
INFINITE = "<infinite>"
ODD = st.sampled_from(
    [None, True, -1, 5, 2**70, 1e308, INFINITE, "x", "", "\ud800", "(", "#", "#/", "#/$defs/none", "http://x", [], {},
     [1], [[]], {"$ref": "#"}, {"$ref": "#/properties/a"}, {"type": "nope"}, {"anyOf": []}, {"": {"": {}}}]
)  # fmt: skip
HOSTILE = st.sampled_from(
    ["(", ")", "[", "{1000}", "{1,}", "*", "+?", "|", "\\", "(?=a)", "\\p{L}", ".*", "~", "&", "/", '"', "\n", ":", 
     "%json {", "%json [", "%lark {", "%ignore", "start:", "@x", "<[7]>", "\0", "\ud800", "🦊", 
     "{" * 300, "(" * 300, "a" * 5000]
)  # fmt: skip


def places(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*inside, key)
        yield from places(value[key], (*inside, key))


def part_at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def one_of(draw: st.DrawFn, several: list[Any]) -> Any:
    return deepcopy(several[draw(st.integers(0, len(several) - 1))])


@st.composite
def mutated_json(draw: st.DrawFn, real: list[Any]) -> Any:
    """One of `real` of which some parts are others, elsewhere, nested or gone."""
    holder = [one_of(draw, real)]
    for _ in range(draw(st.integers(0, 3))):
        found = list(places(holder))
        if not found:
            break
        *outer, key = one_of(draw, found)
        parent = part_at(holder, tuple(outer))
        match draw(st.sampled_from(["odd", "other", "nested", "gone", "named", "whole"])):
            case "odd":
                parent[key] = deepcopy(draw(ODD))  # what is put in may be changed itself
            case "other":
                parent[key] = one_of(draw, SCHEMAS)
            case "nested":
                for _ in range(draw(st.sampled_from([1, 3, 40]))):
                    parent[key] = {draw(st.sampled_from(["items", "not", "allOf", "$defs"])): parent[key]}
            case "gone" if outer:
                del parent[key]
            case "named" if isinstance(parent, dict):
                parent[draw(st.sampled_from(KEYWORDS))] = parent.pop(key)
            case "whole":
                parent[key] = deepcopy(holder[0])
    return holder[0] if holder else None


@st.composite
def mutated_text(draw: st.DrawFn, real: list[str]) -> str:
    text = draw(st.sampled_from(real))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 6)))
        middle = draw(st.sampled_from(["", text[at:end] * 20])) + draw(HOSTILE)
        text = text[:at] + middle + text[end:]
    return text


def tags_of(schema: Any) -> dict[str, Any]:
    return {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}


SCHEMA = mutated_json(SCHEMAS)
TAGS = mutated_json([tags_of(schema) for schema in SCHEMAS])
TOOL = mutated_json(TOOLS) | st.builds(
    lambda schema: {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}, SCHEMA
)
CHOICE = st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}])
BODIES = st.one_of(
    st.builds(lambda said: {"guided_json": said}, SCHEMA),
    st.builds(lambda said: {"guided_json": encoded(said)}, SCHEMA),
    st.builds(lambda said: {"response_format": {"type": "json_schema", "json_schema": {"schema": said}}}, SCHEMA),
    st.builds(lambda said: {"response_format": said}, mutated_json([{"type": "json_object"}, {"type": "text"}])),
    st.builds(lambda said: {"structured_outputs": {"structural_tag": encoded(said)}}, TAGS),
    st.builds(lambda said: {"guided_regex": said}, mutated_text(REGEXES)),
    st.builds(lambda said: {"guided_grammar": said}, mutated_text(GRAMMARS)),
    st.builds(lambda said: {"structured_outputs": {"choice": said}}, mutated_json([["yes", "no"], ["x"]])),
    st.builds(lambda tools, choice: {"tools": tools, "tool_choice": choice}, st.lists(TOOL, max_size=3), CHOICE),
)
STRUCTURES = st.one_of(
    st.builds(lambda said: {"json": encoded(said)}, SCHEMA),
    st.builds(lambda said: {"structural_tag": encoded(said)}, TAGS),
    st.builds(lambda said: {"regex": said}, mutated_text(REGEXES).filter(str.isprintable)),
    st.builds(lambda said: {"grammar": said}, mutated_text(GRAMMARS).filter(lambda text: "\ud800" not in text)),
)


def encoded(said: Any) -> str:
    return json.dumps(said).replace(f'"{INFINITE}"', "1e999")


async def still_serves(gateway: Gateway, http: httpx.AsyncClient) -> None:
    await eventually(lambda: gateway.readiness()[0])
    said = {"model": MODEL, "prompt": "x", "max_tokens": 2, "guided_regex": "still serves"}
    answer = await http.post("/v1/completions", json=said)
    assert answer.status_code == 200, answer.text


def compile_all(peers: Peers, model_folder: Path, vocab_size: int) -> int:
    """Fails as a worker would: by a signal, or by an error that the gateway should have reported."""
    grammars = Grammars(model_folder, vocab_size)
    found = {spec.sampling.grammar for spec in peers.decode.seen} - {""}
    refused = []
    for grammar in found:
        try:
            grammars.start(grammar)
        except InvalidGrammar as error:
            refused.append((grammar, str(error)))
    assert refused == []
    return len(found)


async def test_structures_over_http(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers, model_folder: Path
) -> None:
    wrong, seen = [], set()
    for said in collected(BODIES, 150):
        chat = {"messages": [{"role": "user", "content": "x"}]}
        body = encoded({"model": MODEL, "max_tokens": 2, **chat, **said}).encode()
        answer = await http.post("/v1/chat/completions", content=body, headers={"x-request-timeout-ms": "30000"})
        seen.add(answer.status_code)
        error = {} if answer.status_code == 200 else answer.json()["error"]
        named = error.get("param") or "is not valid JSON" in error.get("message", "")
        if answer.status_code != 200 and (answer.status_code != 400 or not named):
            wrong.append((answer.status_code, answer.text[:300], body[:2000]))
    assert wrong == []
    assert seen == {200, 400}
    assert compile_all(peers, model_folder, gateway.directory.llm_of(None).model.tokenizer.vocab_size) > 10
    await still_serves(gateway, http)


async def test_structures_over_grpc(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers, model_folder: Path
) -> None:
    wrong, seen = [], set()
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        for said in collected(STRUCTURES, 80):
            asked = llm_pb2.StructuredOutputs(**said)
            sampling = llm_pb2.SamplingParams(max_tokens=2)
            request = llm_pb2.GenerateRequest(model=MODEL, prompt="x", structured_outputs=asked, sampling=sampling)
            code, details = grpc.StatusCode.OK, ""
            try:
                await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request), timeout=30)
            except aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
            seen.add(code)
            if code is not grpc.StatusCode.OK and not details.startswith("structured_outputs."):
                wrong.append((code, details, said))
    assert wrong == []
    assert seen == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert compile_all(peers, model_folder, gateway.directory.llm_of(None).model.tokenizer.vocab_size) > 10
    await still_serves(gateway, http)
