"""/v1/responses, as the official client reads it, with its types held strictly."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from grpc import StatusCode
from openai import AsyncOpenAI, BadRequestError

from services.gateway import Gateway
from services.gateway.apis.responses.fitting import newest
from services.gateway.bodies import LARGE
from services.gateway.text import Tokenizer
from services.gateway.tools import TAGS
from tests.gateway.conftest import TEXT
from tests.gateway.peers import MODEL, Peers

ASKED: Any = {"model": MODEL, "input": "tell me", "extra_body": {"seed": 0}}


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_a_whole_response(client: AsyncOpenAI, peers: Peers) -> None:
    found = await client.responses.create(**ASKED, instructions="be brief", metadata={"a": "b"}, store=True)
    assert (found.status, found.output_text) == ("completed", TEXT)
    assert (found.instructions, found.metadata) == ("be brief", {"a": "b"})
    assert found.to_dict()["store"] is False
    assert found.usage is not None
    assert found.usage.input_tokens == len(peers.decode.seen[0].token_ids)
    assert found.usage.input_tokens_details.cached_tokens == 3
    assert found.usage.input_tokens_details.cache_write_tokens == found.usage.input_tokens - 3
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


async def test_a_stream_ends_with_the_items_that_it_began(client: AsyncOpenAI) -> None:
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said: list[dict[str, Any]] = [event.to_dict() for event in events]
    assert "".join(event["delta"] for event in said[4:-4]) == TEXT
    whole = said[-1]["response"]
    assert whole["output"] == [said[-2]["item"]]
    assert {event["response"]["id"] for event in said if "response" in event} == {whole["id"]}
    ids = {event["item_id"] for event in said if "item_id" in event}
    assert ids == {said[2]["item"]["id"]} == {whole["output"][0]["id"]}
    assert whole["output"][0]["content"][0]["text"] == TEXT


async def test_a_stream_begins_before_its_prompt_is_computed(client: AsyncOpenAI, peers: Peers) -> None:
    peers.prefill.hold.clear()
    stream = aiter(await client.responses.create(**ASKED, stream=True))
    assert [(await anext(stream)).type for _ in range(2)] == ["response.created", "response.in_progress"]
    peers.prefill.hold.set()
    events = [event async for event in stream]
    assert events[0].sequence_number == 2
    assert events[-1].type == "response.completed"


async def test_a_refusal_has_a_status_though_a_stream_was_asked_for(
    http: httpx.AsyncClient, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.door.pings.BEGIN_S", 60.0)  # the refusal is first, slow as it may be
    peers.prefill.refuse = peers.decode.refuse = StatusCode.INVALID_ARGUMENT
    answer = await http.post("/v1/responses", json={"model": MODEL, "input": "x", "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")


async def test_a_websocket_is_refused_at_once(http: httpx.AsyncClient) -> None:
    wanted = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    answer = await http.get("/v1/responses", headers=wanted)
    assert (answer.status_code, answer.json()["error"]["type"]) == (426, "invalid_request_error")
    assert (await http.get("/v1/responses")).status_code == 405


async def test_an_answer_that_is_cut_off_is_incomplete(client: AsyncOpenAI) -> None:
    found = await client.responses.create(**ASKED, max_output_tokens=2)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await client.responses.create(**ASKED, max_output_tokens=2, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_input_tokens_are_counted_as_a_response_would_read_them(
    http: httpx.AsyncClient, client: AsyncOpenAI, peers: Peers
) -> None:
    asked: Any = {"model": MODEL, "input": "tell me", "instructions": "be brief"}
    counted = await client.responses.input_tokens.count(**asked)
    made = await client.responses.create(**asked)
    assert made.usage is not None
    assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": made.usage.input_tokens}
    answer = await http.post("/v1/responses/input_tokens", json={**asked, "metadata": {"x": "y"}, "x": "x" * LARGE})
    assert answer.json() == counted.to_dict()
    for said, param in (({"input": []}, "input"), ({"model": "other"}, "model"), ({"tools": [{"type": 1}]}, "tools")):
        answer = await http.post("/v1/responses/input_tokens", json=asked | said)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"].startswith(param)


async def test_items_are_the_messages_that_a_chat_would_have(
    http: httpx.AsyncClient, client: AsyncOpenAI, peers: Peers
) -> None:
    said = [("user", "input_text", "hi"), ("assistant", "output_text", "hello"), ("user", "input_text", "tell me")]
    items: Any = [
        {"id": f"msg_{i}", "role": role, "content": [{"type": kind, "text": text}]}
        for i, (role, kind, text) in enumerate(said)
    ]
    await client.responses.create(**{**ASKED, "input": items}, instructions="be brief")
    messages = [{"role": "system", "content": "be brief"}, *({"role": role, "content": text} for role, _, text in said)]
    await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "seed": 0})
    ours, chats = (list(spec.token_ids) for spec in peers.decode.seen[:2])
    assert ours == chats


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "x": 2**70}}}, "text.format"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, said: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/responses", json={"model": MODEL, "input": "x", **said})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


async def test_thoughts_are_an_item_before_the_message(
    client: AsyncOpenAI, gateway: Gateway, peers: Peers, tokenizer: Tokenizer
) -> None:
    object.__setattr__(gateway.directory.llm_of(None).model, "thoughts", TAGS["think"])
    ids = list(tokenizer.token_ids("<think>\nfirst this\n</think>\n\nthen that"))
    peers.prefill.generator.reply = peers.decode.generator.reply = lambda spec: ids
    whole = await client.responses.create(**ASKED)
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output_text == "then that"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    said = [event.to_dict() for event in events]
    kept: Any = said[-1]["response"]
    assert [part["text"] for item in kept["output"] for part in item["content"]] == ["first this", "then that"]
    assert [event["item"] for event in said if event["type"] == "response.output_item.done"] == kept["output"]
    thoughts = [event["delta"] for event in said if event["type"] == "response.reasoning_text.delta"]
    assert "".join(map(str, thoughts)) == "first this"


async def test_a_stream_whose_worker_dies_ends_as_failed(client: AsyncOpenAI, peers: Peers) -> None:
    peers.decode.step_s = 0.01
    asked = {**ASKED, "extra_body": {"seed": 0, "ignore_eos": True}, "max_output_tokens": 200}
    stream = aiter(await client.responses.create(**asked, stream=True))
    events = [await anext(stream)]
    await peers.workers["d"].die()
    events += [event async for event in stream]
    error, failed = (event.to_dict() for event in events[-2:])
    assert (error["type"], error["code"]) == ("error", "worker_lost")
    kept: Any = failed["response"]
    assert (failed["type"], kept["status"], kept["error"]["code"]) == ("response.failed", "failed", "server_error")
    assert [event.to_dict()["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.long
@pytest.mark.parametrize("filler", ["", "x" * LARGE], ids=["small", "large"])
@pytest.mark.parametrize("size", [20, 400], ids=["by tokens", "by characters"])
async def test_an_input_that_is_too_long_loses_its_oldest_items(
    client: AsyncOpenAI, peers: Peers, tokenizer: Tokenizer, filler: str, size: int
) -> None:
    turns: Any = [{"role": "user", "content": f"{number} {'x' * size}"} for number in range(60)]
    items = [{"role": "developer", "content": "stay"}, *turns, {"role": "user", "content": "the last"}]
    asked: Any = {"model": MODEL, "input": items, "instructions": "be brief", "max_output_tokens": 8}
    with pytest.raises(BadRequestError, match="maximum context length"):
        await client.responses.create(**asked, extra_body={"x": filler})
    found = await client.responses.create(**asked, truncation="auto", extra_body={"x": filler})
    assert (found.truncation, found.status) == ("auto", "incomplete")
    (spec,) = peers.decode.seen
    prompt = tokenizer.decode(list(spec.token_ids), skip_special_tokens=False)
    assert len(spec.token_ids) <= peers.max_model_len - 8
    assert "be brief\nstay" in prompt
    assert "the last" in prompt
    kept = [int(number) for number in re.findall(r"(\d+) xxx", prompt)]
    assert kept == list(range(60 - len(kept), 60))
    assert bool(kept) is (size == 20)


def test_a_result_goes_with_its_call() -> None:
    system, call, others = {"role": "system"}, {"type": "function_call", "call_id": "a"}, [{"role": "user"}] * 3
    items = [system, call, *others, {"type": "function_call_output", "call_id": "a"}, *others]
    assert newest(items, 10_000) == items
    assert newest(items, 130) == [system, *others[:2], *others]
    assert newest(items, 0) == [system, others[0]]
    assert newest([None, {"call_id": []}, 5], 3) == [5]
    assert newest("text", 0) == "text"


async def test_what_stays_may_be_too_long_itself(client: AsyncOpenAI) -> None:
    long = "x" * 2000
    short: Any = [{"role": "user", "content": "a"}] * 9
    for said in (long, [{"role": "user", "content": long}], [{"role": "system", "content": long}, *short]):
        with pytest.raises(BadRequestError) as refused:
            await client.responses.create(model=MODEL, input=said, truncation="auto")  # type: ignore[arg-type]
        assert refused.value.code == "context_length_exceeded"
