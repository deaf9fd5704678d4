"""Responses that are kept, in a real Redis that evicts, as the official client asks for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from hypothesis import strategies as st
from openai import AsyncOpenAI

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.admission import FAIRNESS_ID
from services.gateway.apis.responses.kept import background
from services.gateway.apis.responses.kept.kept import Kept
from services.gateway.apis.responses.kept.recalling import MOST_REFERENCES, kept_of
from services.gateway.apis.responses.schema import MOST_OF_TURN
from services.gateway.bodies import LARGE
from services.gateway.text import Tokenizer
from tandem.local import RedisServer, free_ports
from tests.fuzzing import collected
from tests.gateway.conftest import TEXT, eventually, make_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_fuzz import TYPED, VALUES

ASKED: Any = {"model": MODEL, "input": "tell me", "extra_body": {"seed": 0}, "max_output_tokens": 4}
KEY = {"authorization": "Bearer none"}  # the official client's


@pytest.fixture(scope="module")
def kept() -> Iterator[RedisServer]:
    with RedisServer.start(max_memory_mb=16, evicts=True) as server:
        yield server


@pytest.fixture
def settings(
    model_folder: Path, redis: RedisServer, kept: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> GatewaySettings:
    monkeypatch.setattr("services.gateway.apis.responses.kept.recalling.MAX_KEPT_BYTES", 20_000)
    return make_settings(redis, store_url=kept.url)


def client_of(base: str, owner: str = "") -> AsyncOpenAI:
    headers = {FAIRNESS_ID: owner} if owner else {}
    return AsyncOpenAI(
        base_url=f"{base}/v1", api_key="none", max_retries=0, default_headers=headers, _strict_response_validation=True
    )


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(str(http.base_url)) as client:
        yield client


def prompts(peers: Peers, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(list(spec.token_ids), skip_special_tokens=False) for spec in peers.decode.seen]


async def test_a_response_goes_on_from_another_at_any_gateway(
    client: AsyncOpenAI, settings: GatewaySettings, peers: Peers, tokenizer: Tokenizer
) -> None:
    first = await client.responses.create(**ASKED, instructions="be brief")
    assert first.to_dict()["store"] is True
    counted = await client.responses.input_tokens.count(model=MODEL, input="more", previous_response_id=first.id)
    other = settings.model_copy(update={"http_port": free_ports(1)[0]})
    async with make_gateway(other) as gateway, client_of(f"http://127.0.0.1:{other.http_port}") as there:
        await eventually(lambda: gateway.readiness()[0])
        asked = {**ASKED, "input": "more", "previous_response_id": first.id, "stream": True}
        events = [event async for event in await there.responses.create(**asked)]
        last: Any = events[-1]
        assert last.type == "response.incomplete"
        found = await there.responses.retrieve(last.response.id)
        assert found.to_dict() == last.response.to_dict()
        assert found.previous_response_id == first.id
        assert found.usage
        assert found.usage.input_tokens == counted.input_tokens
        items = await there.responses.input_items.list(found.id, order="asc")
        said: Any = [(item.to_dict()["role"], item.to_dict()["content"][0]["text"]) for item in items.data]  # type: ignore[index]
        assert said == [("user", "tell me"), ("assistant", first.output_text), ("user", "more")]
    assert prompts(peers, tokenizer)[:2] == [
        "<s><system>be brief\n<user>tell me\n<assistant>",
        f"<s><user>tell me\n<assistant>{first.output_text}\n<user>more\n<assistant>",
    ]
    page = await client.responses.input_items.list(found.id, limit=2)
    assert (page.has_more, page.data[0].to_dict()["content"][0]["text"]) == (True, "more")  # type: ignore[index]
    rest = await client.responses.input_items.list(found.id, limit=2, after=page.data[-1].id or "")
    assert [item.to_dict()["role"] for item in rest.data] == ["user"]
    assert not rest.has_more


async def test_a_response_is_its_owners_alone(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    found = await client.responses.create(**ASKED)
    async with client_of(str(http.base_url), "another") as other:
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(found.id)  # type: ignore[operator]
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await other.responses.create(**ASKED, previous_response_id=found.id)
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]"):
            await other.responses.create(**{**ASKED, "input": [{"type": "item_reference", "id": found.output[0].id}]})
    assert (await client.responses.retrieve(found.id)).id == found.id
    await client.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(found.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(**{**ASKED, "input": [{"type": "item_reference", "id": found.output[0].id}]})


async def test_a_conversation_grows_by_its_turns(client: AsyncOpenAI, peers: Peers, tokenizer: Tokenizer) -> None:
    item: Any = {"role": "user", "content": "hi"}
    conversation = await client.conversations.create(items=[item], metadata={"a": "b"})
    assert (await client.conversations.retrieve(conversation.id)).metadata == {"a": "b"}
    first = await client.responses.create(**ASKED, conversation=conversation.id, store=False)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    await client.responses.create(**{**ASKED, "input": "more"}, conversation={"id": conversation.id})
    said = f"<s><user>hi\ntell me\n<assistant>{first.output_text}\n<user>more\n<assistant>"
    assert prompts(peers, tokenizer)[1] == said
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    items = (await client.conversations.items.list(conversation.id, order="asc")).data
    assert [one.to_dict()["role"] for one in items] == ["user", "user", "assistant", "user", "assistant"]
    await client.conversations.items.delete(items[0].id or "", conversation_id=conversation.id)
    added = await client.conversations.items.create(conversation.id, items=[item])
    got = await client.conversations.items.retrieve(added.data[0].id or "", conversation_id=conversation.id)
    assert got.to_dict() == added.data[0].to_dict()
    assert len((await client.conversations.items.list(conversation.id)).data) == 5
    assert (await client.conversations.update(conversation.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await client.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.BadRequestError, match="conversation"):
        await client.responses.create(**ASKED, conversation=conversation.id)


async def test_the_same_words_said_again_are_another_turn(
    client: AsyncOpenAI, peers: Peers, tokenizer: Tokenizer
) -> None:
    """An item without an id gets one of its own, by whichever way it comes into a conversation."""
    conversation = await client.conversations.create()
    item: Any = {"type": "message", "role": "user", "content": "continue", "id": None}
    asked: Any = {**ASKED, "input": "continue", "conversation": conversation.id}
    first = await client.responses.create(**asked)
    second = await client.responses.create(**asked)
    await client.responses.create(**asked)
    await client.conversations.items.create(conversation.id, items=[item, item])
    await client.conversations.items.create(conversation.id, items=[item])
    items = (await client.conversations.items.list(conversation.id, order="asc")).data
    assert [one.to_dict()["role"] for one in items] == ["user", "assistant"] * 3 + ["user"] * 3
    assert len({one.id for one in items}) == len(items)
    said = f"<s><user>continue\n<assistant>{first.output_text}\n<user>continue\n<assistant>"
    assert prompts(peers, tokenizer)[1] == said
    assert prompts(peers, tokenizer)[2] == f"{said}{second.output_text}\n<user>continue\n<assistant>"


async def test_a_large_bodys_words_said_again_are_another_turn(client: AsyncOpenAI) -> None:
    conversation = await client.conversations.create()
    large: Any = {**ASKED, "input": "continue", "extra_body": {"seed": 0, "x": "x" * LARGE}}
    for _ in range(2):
        await client.responses.create(**large, conversation=conversation.id)
    items = (await client.conversations.items.list(conversation.id)).data
    assert len({one.id for one in items}) == 4


async def test_items_are_named_instead_of_repeated(client: AsyncOpenAI, peers: Peers, tokenizer: Tokenizer) -> None:
    first = await client.responses.create(**ASKED)
    items: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "so?"}]
    await client.responses.create(**{**ASKED, "input": items})
    assert prompts(peers, tokenizer)[1] == f"<s><assistant>{first.output_text}\n<user>so?\n<assistant>"


async def test_an_id_of_another_kind_names_nothing(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    http.headers.update(KEY)
    conversation = await client.conversations.create()
    queued = await client.responses.create(**ASKED, background=True)
    response = await ended(client, queued.id)
    item = response.output[0].id
    ids = {
        "responses": [conversation.id, item, f"{response.id}:events", f"{response.id}:alive", "resp_" + "x" * 10_000],
        "conversations": [
            response.id,
            item,
            f"{response.id}:events",
            "conv_",
            "conv_%00",
            "conv_%ff",
            "conv_%ed%a0%80",
        ],
    }
    for kind, wrong in ids.items():
        for name in (*wrong, "x", "ü", "%00", "resp_ü"):
            path = f"/v1/{kind}/{name}"
            for method in ("GET", "DELETE"):
                answer = await http.request(method, path)
                assert (answer.status_code, method, path) == (404, method, path), answer.text
            below = f"{path}/input_items" if kind == "responses" else f"{path}/items"
            assert (await http.get(below)).status_code == 404, below
    for field, wrong in (("previous_response_id", ids["responses"]), ("conversation", ids["conversations"])):
        for name in (*wrong, "x", "ü", ""):
            answer = await http.post("/v1/responses", json={"model": MODEL, "input": "x", field: name})
            assert answer.status_code == 400 or (name == "" and answer.status_code == 200), (field, name, answer.text)
            assert name == "" or answer.json()["error"]["param"] == field
    for name in (conversation.id, response.id, f"{response.id}:events", "\0", 7, None, {}, ["x"]):
        asked = {"model": MODEL, "input": [{"type": "item_reference", "id": name}]}
        answer = await http.post("/v1/responses", json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].id"), answer.text
    assert (await client.responses.retrieve(response.id)).id == response.id
    assert (await client.conversations.retrieve(conversation.id)).id == conversation.id


async def test_what_is_referred_to_is_bounded_before_it_is_read(
    client: AsyncOpenAI, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short list of references must not make a long input."""
    read = list[str]()
    item = Kept.item

    async def counted(self: Kept, item_id: str) -> bytes:
        read.append(item_id)
        return await item(self, item_id)

    monkeypatch.setattr(Kept, "item", counted)
    first = await client.responses.create(**{**ASKED, "max_output_tokens": 50})
    reference = {"type": "item_reference", "id": first.output[0].id}
    twice: Any = [reference, {"role": "user", "content": "so?"}, reference, {"role": "user", "content": "so?"}]
    await client.responses.create(**{**ASKED, "input": twice})
    assert len(read) == 1
    many: Any = [reference] * (MOST_REFERENCES + 1)
    with pytest.raises(openai.BadRequestError, match=f"at most {MOST_REFERENCES} item_references, got") as caught:
        await client.responses.create(**{**ASKED, "input": many})
    assert (caught.value.param, len(read)) == ("input", 1)
    large: Any = [reference] * 200
    with pytest.raises(openai.BadRequestError, match="more than 20000 bytes with what it refers to") as caught:
        await client.responses.create(**{**ASKED, "input": large})
    assert caught.value.param
    assert caught.value.param.startswith("input[")
    assert len(read) == 2


async def test_a_turn_of_a_conversation_is_bounded(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """By count and bytes, before an answer is made that the conversation could not take."""
    http.headers.update(KEY)
    conversation = await client.conversations.create()
    item = {"role": "user", "content": ""}
    for count, padding in ((MOST_OF_TURN + 1, ""), (MOST_OF_TURN + 1, "x" * LARGE), (70_000, "")):
        body = {**ASKED, "input": [item] * count, "conversation": conversation.id, "padding": padding}
        answer = await http.post("/v1/responses", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input"), error
        assert f"at most {MOST_OF_TURN} items beside conversation, got {count}" in error["message"]
    body = {**ASKED, "input": "x" * 100, "conversation": conversation.id}
    assert (await http.post("/v1/responses", json=body)).status_code == 200
    body["input"] = [{**item, "content": [{"type": "input_text", "text": ""}] * 40}] * 15
    answer = await http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "conversation_full"), answer.text
    assert len((await client.conversations.items.list(conversation.id)).data) == 2


async def test_a_large_body_goes_on_from_a_small_one(client: AsyncOpenAI, peers: Peers, tokenizer: Tokenizer) -> None:
    first = await client.responses.create(**ASKED)
    large = {**ASKED, "input": "more", "extra_body": {"seed": 0, "x": "x" * LARGE}}
    second = await client.responses.create(**large, previous_response_id=first.id)
    assert second.to_dict()["store"] is True
    assert prompts(peers, tokenizer)[1] == f"<s><user>tell me\n<assistant>{first.output_text}\n<user>more\n<assistant>"
    items = await client.responses.input_items.list(second.id)
    assert len(items.data) == 3


async def test_what_is_too_large_is_not_kept_and_says_so(client: AsyncOpenAI) -> None:
    found = await client.responses.create(**ASKED, instructions="", metadata={f"k{i}": "x" * 500 for i in range(16)})
    assert found.to_dict()["store"] is True
    many: Any = [{"role": "user", "content": ""}] * 200
    found = await client.responses.create(**{**ASKED, "input": many})
    assert found.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(found.id)


async def test_without_its_store_an_answer_comes_all_the_same(
    client: AsyncOpenAI, gateway: Gateway, kept: RedisServer
) -> None:
    first = await client.responses.create(**ASKED)
    kept.pause()
    try:
        found = await client.responses.create(**ASKED, store=True)
        assert (found.output_text, found.to_dict()["store"]) == (first.output_text, False)
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as caught:
            await client.responses.create(**ASKED, previous_response_id=first.id)
        assert caught.value.status_code == 503
    finally:
        kept.resume()
    await eventually(lambda: _is_there(client, first.id))
    assert TEXT.startswith(first.output_text)


async def _is_there(client: AsyncOpenAI, response_id: str) -> bool:
    try:
        return (await client.responses.retrieve(response_id)).id == response_id
    except openai.InternalServerError:
        return False


LONG: Any = {**ASKED, "extra_body": {"seed": 0, "ignore_eos": True}, "max_output_tokens": 200, "background": True}


async def ended(client: AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(30):
        while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
    return found


async def test_a_response_in_the_background_is_fetched_at_any_gateway(
    client: AsyncOpenAI, settings: GatewaySettings
) -> None:
    queued = await client.responses.create(**ASKED, background=True)
    assert (queued.status, queued.background) == ("queued", True)
    other = settings.model_copy(update={"http_port": free_ports(1)[0]})
    async with make_gateway(other), client_of(f"http://127.0.0.1:{other.http_port}") as there:
        found = await ended(there, queued.id)
        assert found.status == "incomplete"
        assert found.output_text
        assert TEXT.startswith(found.output_text)
        events = [event async for event in await there.responses.retrieve(queued.id, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].to_dict()["response"] == found.to_dict()
        late = [event async for event in await there.responses.retrieve(queued.id, stream=True, starting_after=3)]
        assert late == events[4:]


async def test_a_background_stream_is_that_of_its_response(client: AsyncOpenAI) -> None:
    events = [event async for event in await client.responses.create(**ASKED, background=True, stream=True)]
    last: Any = events[-1]
    assert (events[0].type, last.type) == ("response.created", "response.incomplete")
    assert (await client.responses.retrieve(last.response.id)).to_dict() == last.response.to_dict()


async def test_a_background_stream_has_one_end(client: AsyncOpenAI) -> None:
    """A reader that has had the end and comes again is told no other."""
    events = [event async for event in await client.responses.create(**ASKED, background=True, stream=True)]
    last: Any = events[-1]
    number = last.sequence_number
    for after, left in ((number - 2, events[-2:]), (number, []), (number + 1, [])):
        stream = await client.responses.retrieve(last.response.id, stream=True, starting_after=after)
        assert [event async for event in stream] == left


async def test_an_end_that_is_kept_before_its_events_were_told_waits_for_them(
    client: AsyncOpenAI, gateway: Gateway
) -> None:
    shared = gateway.shared
    store = kept_of(shared, shared.access.tenant(shared.access.authenticate(KEY), KEY, "", "user"))
    assert store is not None
    made = [event async for event in await client.responses.create(**ASKED, background=True, stream=True)]
    last: Any = made[-1]
    known = await store.events(last.response.id, 0)
    name = last.response.id + "again"
    await store.beat(name, known[:3], 60)
    await store.keep({**orjson.loads(await store.response(last.response.id)), "id": name}, b"[]")
    events = aiter(await client.responses.retrieve(name, stream=True))
    assert [(await anext(events)).sequence_number for _ in range(3)] == [0, 1, 2]
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(2 * background.BEAT_S)
    assert not waiting.done()
    await store.beat(name, known[3:], 60)
    rest = [await waiting, *[event async for event in events]]
    assert [event.sequence_number for event in rest] == list(range(3, len(made)))


async def test_a_cancelled_stream_has_one_end(client: AsyncOpenAI, http: httpx.AsyncClient, peers: Peers) -> None:
    peers.decode.step_s = 0.02
    queued = await client.responses.create(**LONG)
    path = f"/v1/responses/{queued.id}"
    http.headers.update(KEY)
    assert (await http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    told = (await http.get(path, params={"stream": "true"})).text
    assert told.count("event: response.cancelled") == 1
    number = told.count("event: ") - 1
    assert f'"sequence_number":{number}}}' in told
    again = await http.get(path, params={"stream": "true", "starting_after": number})
    assert again.text == "data: [DONE]\n\n"


async def test_a_cancelled_response_frees_its_workers(client: AsyncOpenAI, gateway: Gateway, peers: Peers) -> None:
    peers.decode.step_s = 0.02
    queued = await client.responses.create(**LONG)
    await eventually(lambda: bool(gateway.shared.state.running))
    assert (await client.responses.cancel(queued.id)).status == "cancelled"
    await eventually(lambda: not gateway.shared.state.running and not len(gateway.shared.detached))
    assert (await client.responses.retrieve(queued.id)).status == "cancelled"
    queued = await client.responses.create(**LONG)
    await eventually(lambda: bool(gateway.shared.state.running))
    await client.responses.delete(queued.id)
    await eventually(lambda: not gateway.shared.state.running and not len(gateway.shared.detached))
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(queued.id)
    done = await client.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(done.id)


async def test_a_background_response_of_a_worker_or_gateway_that_is_gone_has_failed(
    client: AsyncOpenAI, gateway: Gateway, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.decode.step_s = 0.02
    queued = await client.responses.create(**LONG)
    await eventually(lambda: bool(gateway.shared.state.running))
    await peers.workers["d"].die()
    found = await ended(client, queued.id)
    assert (found.status, found.error.code) == ("failed", "server_error")
    slow: Any = (await peers.add_decode("d2")).servicer
    slow.step_s = 0.02
    await eventually(lambda: gateway.readiness()[0])
    monkeypatch.setattr("services.gateway.apis.responses.kept.background.ALIVE_S", 1)
    monkeypatch.setattr("services.gateway.apis.responses.kept.background.BEAT_S", 60.0)  # as if it were gone
    queued = await client.responses.create(**LONG)
    found = await ended(client, queued.id)
    assert (found.status, found.error.message) == ("failed", "the gateway that made this response is gone")


PATHS = ("/v1/conversations", "/v1/conversations/{}", "/v1/conversations/{}/items")
BODIES = st.dictionaries(st.sampled_from(("items", "metadata")), VALUES | st.lists(TYPED, max_size=3), max_size=2)
QUERIES = st.dictionaries(
    st.sampled_from(("order", "limit", "after", "include[]", "stream", "starting_after")),
    st.text(max_size=8),
    max_size=3,
)
GOES_ON = st.fixed_dictionaries(
    {"model": st.just(MODEL), "input": st.lists(TYPED, max_size=2) | st.just("x"), "max_output_tokens": st.just(2)},
    optional={
        "previous_response_id": VALUES | st.just("GOOD"), "conversation": VALUES | st.just("CONV"), "store": VALUES,
        "background": VALUES,
    },
)  # fmt: skip


async def test_anything_at_all_is_a_success_or_the_clients_fault(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    http.headers["content-type"] = "application/json"
    http.headers["authorization"] = "Bearer none"  # whose they are, where nothing else says so
    response = await client.responses.create(**ASKED)
    conversation = await client.conversations.create()
    statuses = set()
    for number, (body, query, asked) in enumerate(collected(st.tuples(BODIES, QUERIES, GOES_ON), 80)):
        path = PATHS[number % len(PATHS)].format(conversation.id)
        named = {"GOOD": response.id, "CONV": conversation.id}
        asked = {key: named.get(value, value) if isinstance(value, str) else value for key, value in asked.items()}
        answers = [
            await http.post(path, content=json.dumps(body)),
            await http.post("/v1/responses", content=json.dumps(asked)),
            await http.get(f"/v1/conversations/{conversation.id}/items", params=query),
            await http.get(f"/v1/responses/{response.id}/input_items", params=query),
            await http.get(f"/v1/responses/{response.id}", params=query),
            await http.post(f"/v1/responses/{response.id}/cancel", content=json.dumps(body)),
        ]
        statuses |= {answer.status_code for answer in answers}
    assert statuses == {200, 400}
