"""One name, several models: each user has one of them, by weights that change at run time, and answers say which."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.model import ModelAsked
from services.gateway.model.aliases import MAX_USER_LENGTH, USER_FIELDS
from tandem.adapters import AdapterRef
from tandem.aliases import Alias, Targets
from tandem.commands.models import main as models_command
from tandem.local import free_ports
from tandem.registry import Registry
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.fuzzing import fuzzed
from tests.gateway.conftest import OTHER, eventually, joined, leave, with_settings
from tests.gateway.peers import MODEL, Peers

Models = Callable[..., str]
FAST = "fast"
BODY = {"model": FAST, "prompt": "once upon", "max_tokens": 3}
CHAT = {"model": FAST, "messages": [{"role": "user", "content": "once upon"}], "max_tokens": 3}
SOON_S = 2.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("fallback"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
USERS = st.sampled_from((*USER_FIELDS, "model", "id"))


@fuzzed(300)
@given(JSON | st.dictionaries(USERS, JSON | st.dictionaries(st.sampled_from(("id", "user_id")), JSON)))
def test_whatever_a_body_says_of_its_user_is_a_short_text(fields: Any) -> None:
    asked = ModelAsked.of(fields)
    assert isinstance(asked.user, str)
    assert len(asked.user) <= MAX_USER_LENGTH
    Alias("fast", {"a": 1, "b": 1}).choose(asked.user, lambda name: True)


@fuzzed(300)
@given(
    JSON | st.dictionaries(st.sampled_from(("a", "b", "c d", "")), JSON | st.dictionaries(st.text(max_size=3), JSON))
)
def test_settings_are_aliases_or_an_error_that_names_them(said: Any) -> None:
    found: Mapping[str, Targets] = {}
    wrong = {"aliases"}
    try:
        found = GatewaySettings(aliases=said).aliases
    except ValidationError as error:
        wrong = {str(problem["loc"][0]) for problem in error.errors()}
    assert wrong == {"aliases"}
    for name, targets in found.items():
        assert Alias(name, targets).choose("someone", lambda model: True) in targets


@pytest.fixture
def models(settings: GatewaySettings, capsys: pytest.CaptureFixture[str]) -> Models:
    """`tandem models …` on the gateway's registry."""

    def run(*arguments: str) -> str:
        models_command([*arguments, f"--redis-url={settings.redis_url}", f"--namespace={settings.namespace}"])
        return capsys.readouterr().out

    return run


async def told(models: Models, *arguments: str) -> str:
    return await asyncio.to_thread(models, *arguments)


async def answered_by(http: httpx.AsyncClient, path: str = "completions", **body: Any) -> str:
    answer = await http.post(f"/v1/{path}", json={**(CHAT if path != "completions" else BODY), **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == body.get("model", FAST)
    return str(answer.headers["x-tandem-model"])


async def aliased(gateway: Gateway, name: str = FAST, to: frozenset[str] = frozenset({OTHER, MODEL})) -> None:
    async with asyncio.timeout(SOON_S):
        while (found := gateway.directory.aliases.find(name)) is None or found.targets.keys() != to:
            await asyncio.sleep(0.01)


async def test_all_gateways_follow_what_is_said_at_run_time(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, settings: GatewaySettings, models: Models
) -> None:
    await joined(gateway)
    second = settings.model_copy(update={"http_port": free_ports(1)[0]})
    async with make_gateway(second) as other:
        await joined(other)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 404
        said = await told(models, "alias", f"{FAST}={MODEL}:3,{OTHER}:1,nothing:fallback")
        assert said.splitlines() == [
            f"{FAST}: {MODEL} 75.0%, {OTHER} 25.0%, nothing as fallback",
            "nothing has no workers now; it is left out until it has",
        ]
        for one in (gateway, other):
            await aliased(one, to=frozenset({MODEL, OTHER, "nothing"}))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{second.http_port}", timeout=60) as there:
            for user in map(str, range(12)):
                assert await answered_by(http, user=user) == await answered_by(there, user=user)
        assert "75.0%" in await told(models, "list")
        await told(models, "unalias", FAST)
        async with asyncio.timeout(SOON_S):
            while FAST in gateway.directory.aliases.names or FAST in other.directory.aliases.names:
                await asyncio.sleep(0.01)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 404


@with_settings(aliases={FAST: {MODEL: 0.5, OTHER: 0.5}})
async def test_a_user_has_one_model_whatever_he_asks(gateway: Gateway, http: httpx.AsyncClient, others: Peers) -> None:
    """The alias is in the gateway's own settings, as cluster.yaml gives them."""
    await joined(gateway)
    found = Counter[str]()
    for number in range(16):
        user = f"user {number}"
        first = await answered_by(http, user=user)
        found[first] += 1
        padding = {"metadata": {f"k{i}": "v" * 400 for i in range(700)}}  # read by a helper process
        for path, said in (
            ("completions", {"safety_identifier": user}),
            ("chat/completions", {"user": user, **(padding if number < 2 else {})}),
            ("chat/completions", {"prompt_cache_key": user}),
            ("messages", {"metadata": {"user_id": user}}),
        ):
            assert await answered_by(http, path, **said) == first, (path, said)
        headed = await http.post("/v1/completions", json={**BODY, "user": f"{number}"}, headers={"x-session-id": user})
        assert headed.headers["x-tandem-model"] == first
        counted = await http.post("/tokenize", json={"model": FAST, "prompt": "x", "user": user})
        assert counted.json()["max_model_len"] == (128 if first == OTHER else 256)
    assert set(found) == {MODEL, OTHER}
    without = Counter([await answered_by(http) for _ in range(40)])
    assert set(without) == {MODEL, OTHER}


@with_settings(aliases={FAST: {MODEL: 1, OTHER: "fallback"}})
async def test_a_fallback_answers_while_the_others_have_no_workers_and_says_so(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, peers: Peers
) -> None:
    await joined(gateway)
    assert [await answered_by(http) for _ in range(4)] == [MODEL] * 4
    await leave(peers, "d", "p")
    await eventually(lambda: not gateway.directory.llm_of(MODEL).seats)
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.headers["x-tandem-model"] == OTHER
    assert answer.headers["x-tandem-model-reason"] == f"fallback of {FAST}: no workers of {MODEL}"
    (path,) = answer.json()["usage"]["tandem"]
    assert (path["model"], path["model_reason"]) == (OTHER, answer.headers["x-tandem-model-reason"])
    plain = await http.post("/v1/completions", json=BODY | {"model": MODEL})
    assert plain.status_code == 503, "nobody asked for a fallback of the model itself"
    await peers.add_decode()
    await peers.add_prefill()
    await eventually(lambda: gateway.directory.llm_of(MODEL).seats > 0)
    assert await answered_by(http) == MODEL
    lines = (await http.get("/metrics")).text.splitlines()
    counted = "tandem_alias_requests_total"
    assert f'{counted}{{alias="{FAST}",chosen_by="fallback",model_name="{OTHER}"}} 1.0' in lines
    assert f'{counted}{{alias="{FAST}",chosen_by="weight",model_name="{MODEL}"}} 5.0' in lines


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"aliases": {FAST: {OTHER: 1, MODEL: "fallback"}}}, f"fallback of {FAST}: no workers of {OTHER}"),
        ({"aliases": {FAST: {OTHER: 1e6, MODEL: 1e-3}}}, f"{FAST}: {OTHER} has lost its workers"),
    ],
    indirect=["settings"],
)  # fmt: skip
async def test_whose_model_loses_its_workers_before_a_first_token_is_answered_by_another(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, reason: str, streamed: bool
) -> None:
    await joined(gateway)
    await leave(others, "other-p")  # which would send the first token
    others.workers["other-d"].servicer.step_s = 60.0
    asking = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": streamed}))
    await eventually(lambda: any(one.running for one in gateway.directory.llm_of(OTHER).pool.connections))
    await leave(others, "other-d")
    async with asyncio.timeout(20.0):
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert (answer.headers["x-tandem-model"], answer.headers["x-tandem-model-reason"]) == (MODEL, reason)
    assert "error" not in answer.text


@with_settings(aliases={FAST: {OTHER: 1, MODEL: "fallback"}})
async def test_an_answer_that_has_begun_stays_with_its_model(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers
) -> None:
    await joined(gateway)
    others.workers["other-d"].servicer.step_s = 1.0
    async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 9}) as stream:
        lines = aiter(stream.aiter_lines())
        assert (await anext(lines)).startswith("data: {")
        await leave(others, "other-d", "other-p")
        rest = [line async for line in lines]
    assert stream.headers["x-tandem-model"] == OTHER
    assert any('"code":"worker_lost"' in line for line in rest)
    assert "data: [DONE]" not in rest


@with_settings(aliases={FAST: {"nothing": 1, "none": "fallback"}})
async def test_an_alias_of_nothing_is_unavailable_and_not_listed(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
    assert "none of its models has workers" in answer.text
    assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [MODEL]


@with_settings(aliases={MODEL: {OTHER: 1, MODEL: "fallback"}, "loop": {MODEL: 1}, "ring": {"loop": 1}})
async def test_aliases_of_aliases_lead_nowhere_so_none_goes_round(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers
) -> None:
    """An alias may have a model's name; what stands behind one are models."""
    await joined(gateway)
    assert await answered_by(http, model=MODEL) == OTHER
    assert await answered_by(http, model="loop") == MODEL
    assert (await http.post("/v1/completions", json=BODY | {"model": "ring"})).status_code == 503


@with_settings(aliases={FAST: {MODEL: 0.75, OTHER: 0.25}})
async def test_lists_and_grpc_show_what_is_behind(gateway: Gateway, http: httpx.AsyncClient, others: Peers) -> None:
    await joined(gateway)
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert set(cards) == {MODEL, OTHER, FAST}
    assert (cards[FAST]["weights"], cards[FAST]["fallbacks"]) == ({MODEL: 0.75, OTHER: 0.25}, [])
    assert (cards[FAST]["max_model_len"], cards[FAST]["state"]) == (128, "ready")
    assert (await http.get(f"/v1/models/{FAST}")).json() == cards[FAST]
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        listed = {model.id: model for model in (await stub.ListModels(llm_pb2.ListModelsRequest())).models}
        assert dict(listed[FAST].weights) == {MODEL: 0.75, OTHER: 0.25}
        found = set()
        for user in map(str, range(12)):
            limits = llm_pb2.SamplingParams(max_tokens=3)
            asked = llm_pb2.GenerateRequest(model=FAST, prompt="once", tenant=user, sampling=limits)
            whole = await stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked))
            assert (whole.model, whole.path.model) == (FAST, await answered_by(http, user=user))
            large = llm_pb2.GenerateRequest(model=FAST, prompt="a " * 300_000, tenant=user)
            with pytest.raises(aio.AioRpcError) as refused:
                await stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=large))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            longest = 128 if whole.path.model == OTHER else 256
            assert f"maximum context length is {longest}" in str(refused.value.details())
            found.add(whole.path.model)
        assert found == {MODEL, OTHER}


@with_settings(aliases={FAST: {"sql": 1}})
async def test_an_adapter_may_stand_behind_an_alias(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers, settings: GatewaySettings
) -> None:
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    await registry.adapters.put("sql", AdapterRef("sql", "sql", "r1", MODEL))
    await registry.close()
    await gateway.directory.adapters.refresh()
    assert await answered_by(http) == "sql"
    assert peers.decode.seen[-1].adapter.revision == "r1"


@pytest.fixture
async def guarded(settings: GatewaySettings, peers: Peers, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway whose one key may use the alias and nothing else."""
    secret = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"  # sha256 of "password"
    key = {"id": "0" * 8, "sha256": secret, "tenant": "acme", "models": [FAST]}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}), encoding="utf-8")
    async with make_gateway(settings.model_copy(update={"api_keys": tmp_path / "keys.json"})) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        headers = {"authorization": "Bearer tk-00000000-password"}
        base = f"http://127.0.0.1:{settings.http_port}"
        async with httpx.AsyncClient(base_url=base, timeout=60, headers=headers) as http:
            yield http


@with_settings(aliases={FAST: {MODEL: 1}, "slow": {MODEL: 1}, "gone": {"nothing": 1}})
async def test_a_key_for_an_alias_is_one_for_what_is_behind_by_that_name_alone(guarded: httpx.AsyncClient) -> None:
    assert await answered_by(guarded) == MODEL
    assert [card["id"] for card in (await guarded.get("/v1/models")).json()["data"]] == [FAST]
    for name in (MODEL, "slow", "gone"):
        answer = await guarded.post("/v1/completions", json=BODY | {"model": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.text.count("slow") == (name == "slow")


async def test_what_the_registry_says_that_is_none_is_passed_by(
    gateway: Gateway, http: httpx.AsyncClient, settings: GatewaySettings, models: Models
) -> None:
    """As another version, or a hand, may have written it."""
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    connection = registry.aliases._connection
    for name, text in (
        ("a", "[]"),
        ("b", "{"),
        ("c", '{"x": "y"}'),
        ("d", '{"x": NaN}'),
        ("e", "[" * 5000),
        ("f", "1"),
    ):
        await connection.call("named", "aliases", "put", name, text)
    await registry.close()
    await told(models, "alias", f"{FAST}={MODEL}")
    await aliased(gateway, to=frozenset({MODEL}))
    assert gateway.directory.aliases.names == [FAST]
    assert await answered_by(http) == MODEL
    with pytest.raises(SystemExit, match="is no alias that"):
        await told(models, "unalias", "neither")
