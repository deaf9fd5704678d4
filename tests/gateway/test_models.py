"""A gateway serves the models of its workers, and each as its workers do: it has all that it needs from them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest
from grpc import aio

from services.gateway import Gateway
from services.gateway.console.history import TTFT, rates
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import OTHER, TEXT, eventually, joined, leave, with_settings
from tests.gateway.peers import MODEL, REVISION, Peers

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "once upon"}], "max_tokens": 5}
SOON_S = 2.0


def names_of(listed: httpx.Response) -> list[str]:
    return [card["id"] for card in listed.json()["data"]]


async def test_a_model_that_joins_is_served_and_one_that_leaves_is_gone(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, peers: Peers
) -> None:
    async with asyncio.timeout(SOON_S):
        await joined(gateway)
    listed = await http.get("/v1/models")
    assert names_of(listed) == [OTHER, MODEL]
    cards = {card["id"]: card for card in listed.json()["data"]}
    assert (cards[OTHER]["max_model_len"], cards[MODEL]["max_model_len"]) == (128, 256)
    assert cards[OTHER]["fingerprint"] == others.workers["other-d"].info.fingerprint != cards[MODEL]["fingerprint"]
    assert cards[OTHER]["state"] == "ready"
    assert cards[OTHER]["fingerprints"] == {cards[OTHER]["fingerprint"]: 1.0}
    for name, of in ((OTHER, others), (MODEL, peers)):
        answer = await http.post("/v1/completions", json=BODY | {"model": name, "max_tokens": 100, "seed": 0})
        assert answer.json()["choices"][0]["text"] == TEXT
        assert answer.headers["x-tandem-decode-worker"] in of.workers
    await leave(others, "other-d", "other-p")
    async with asyncio.timeout(SOON_S):
        while names_of(await http.get("/v1/models")) != [MODEL]:
            await asyncio.sleep(0.02)
    asked = {**BODY, "model": OTHER}
    assert (await http.post("/v1/completions", json=asked)).status_code == 503, "it may be back in a moment"
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("large", [False, True])
async def test_each_prompt_is_rendered_and_read_as_its_model_does(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, peers: Peers, stream: bool, large: bool
) -> None:
    """A large body is read by a helper process."""
    await joined(gateway)
    padding = {"metadata": {f"k{i}": "v" * 400 for i in range(700)}} if large else {}
    for name, of, decode in ((OTHER, others, "other-d"), (MODEL, peers, "d")):
        llm = gateway.directory.llm_of(name)
        answer = await http.post("/v1/chat/completions", json={**CHAT, **padding, "model": name, "stream": stream})
        assert answer.status_code == 200, answer.text
        seen = of.workers[decode].servicer.seen[-1]
        rendered = llm.model.tokenizer.decode(list(seen.token_ids), skip_special_tokens=False)
        assert rendered == ("other:once upon" if name == OTHER else "<s><user>once upon\n<assistant>")


async def test_names_that_are_not_served_are_told_those_that_are(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers
) -> None:
    await joined(gateway)
    for path, body in (("completions", BODY), ("chat/completions", CHAT), ("responses", {"input": "x"})):
        answer = await http.post(f"/v1/{path}", json={**body, "model": "neither"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].endswith(f"is not served here; models '{OTHER}', '{MODEL}' are")
    answer = await http.post("/tokenize", json={"prompt": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"model is required: one of {OTHER}, {MODEL}"
    counts = [(await http.post("/tokenize", json={"prompt": "the", "model": name})).json() for name in (OTHER, MODEL)]
    assert [count["max_model_len"] for count in counts] == [128, 256]
    for malformed in (b"", b"[]", b'{"model": 3}', b"{", b'{"model": {"a": 1}}'):
        assert (await http.post("/v1/completions", content=malformed)).status_code == 400


async def test_grpc_serves_each_model_and_lists_them(gateway: Gateway, others: Peers, peers: Peers) -> None:
    await joined(gateway)
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        found = (await stub.ListModels(llm_pb2.ListModelsRequest())).models
        fingerprints = (others.workers["other-d"].info.fingerprint, peers.workers["d"].info.fingerprint)
        expected = [(OTHER, 128, fingerprints[0]), (MODEL, 256, fingerprints[1])]
        assert [(model.id, model.max_model_len, model.fingerprint) for model in found] == expected
        for name, of in ((OTHER, others), (MODEL, peers)):
            sampling = llm_pb2.SamplingParams(max_tokens=5)
            request = llm_pb2.GenerateRequest(model=name, prompt="once", sampling=sampling)
            whole = await stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
            assert (whole.model, whole.path.decode_worker in of.workers) == (name, True)
        request = llm_pb2.GenerateRequest(model="neither", prompt="once")
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_two_fingerprints_of_a_name_are_both_served_each_request_by_one(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, peers: Peers
) -> None:
    """As while another tokenizer is rolled out."""
    others.model = MODEL
    await leave(others, "other-d", "other-p")
    await others.add_decode("new-d")
    await others.add_prefill("new-p")
    await eventually(lambda: gateway.readiness()[1]["linked_pairs"] == 2)
    served: Counter[str] = Counter()
    for number in range(40):
        asked = {**BODY, "prompt": f"once upon {number}", "max_tokens": 100, "seed": 0}
        answer = await http.post("/v1/completions", json=asked)
        assert answer.json()["choices"][0]["text"] == TEXT
        workers = {answer.headers[f"x-tandem-{role}-worker"] for role in ("prefill", "decode")}
        assert workers in ({"d", "p"}, {"new-d", "new-p"})
        served[answer.headers["x-tandem-decode-worker"]] += 1
    assert set(served) == {"d", "new-d"}
    (card,) = (await http.get("/v1/models")).json()["data"]
    prints = [peers.workers["d"].info.fingerprint, others.workers["new-d"].info.fingerprint]
    assert card["fingerprints"] == dict.fromkeys(prints, 0.5)
    metrics = (await http.get("/metrics")).text
    for fingerprint, worker in zip(prints, ("d", "new-d"), strict=True):
        said = f'tandem_model_requests_total{{fingerprint="{fingerprint}",model_name="{MODEL}"}}'
        assert f"{said} {served[worker]}.0" in metrics.splitlines()


async def test_a_fingerprint_whose_workers_never_answer_has_no_share(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, peers: Peers
) -> None:
    others.model, others.silent = MODEL, True
    await leave(others, "other-d", "other-p")
    await others.add_decode("new-d")
    await eventually(lambda: len([llm for llm in gateway.directory.versions(MODEL) if llm.pool.workers]) == 2)
    for number in range(20):
        answer = await http.post("/v1/completions", json={**BODY, "prompt": f"once {number}"})
        assert (answer.status_code, answer.headers.get("x-tandem-decode-worker")) == (200, "d")
    (card,) = (await http.get("/v1/models")).json()["data"]
    silent = others.workers["new-d"].info.fingerprint
    assert card["fingerprints"] == {peers.workers["d"].info.fingerprint: 1.0, silent: 0.0}
    for warning in (card["warning"], *(await http.get("/console/feed")).json()["gateway"]["warnings"]):
        assert MODEL in warning
        assert silent[:12] in warning
        assert "new-d" in warning
    await leave(peers, "d", "p")
    await eventually(lambda: not gateway.readiness()[0])
    late = await http.post("/v1/completions", json=BODY, headers={"x-request-timeout-ms": "3000"})
    assert late.status_code in (503, 504)


async def test_a_worker_that_never_answers_keeps_no_request_waiting(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers
) -> None:
    peers.silent = True
    await peers.add_decode("d2")
    await eventually(lambda: gateway.directory.llm_of(MODEL).pool.unmet() == {peers.workers["d2"].info.incarnation})
    began = asyncio.get_running_loop().time()
    for number in range(20):
        answer = await http.post("/v1/completions", json={**BODY, "prompt": f"once {number}"})
        assert (answer.status_code, answer.headers.get("x-tandem-decode-worker")) == (200, "d")
    assert asyncio.get_running_loop().time() - began < 20 * 1.0, "each waits for its stream"


async def test_each_model_has_its_own_metrics(gateway: Gateway, http: httpx.AsyncClient, others: Peers) -> None:
    await joined(gateway)
    for name, count in ((OTHER, 2), (MODEL, 3)):
        for _ in range(count):
            await http.post("/v1/completions", json=BODY | {"model": name})
    text = (await http.get("/metrics")).text
    for name, count in ((OTHER, 2), (MODEL, 3)):
        assert f'vllm:request_generation_tokens_count{{model_name="{name}"}} {count}.0' in text.splitlines()
    assert text.count("# TYPE vllm:request_generation_tokens histogram") == 1


async def test_a_flood_of_one_model_keeps_no_other_waiting(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, peers: Peers
) -> None:
    """All seats of one model are taken and many wait for them; the other's are free."""
    await joined(gateway)
    others.workers["other-d"].servicer.step_s = 30.0
    flood = [asyncio.create_task(http.post("/v1/completions", json=BODY | {"model": OTHER})) for _ in range(90)]
    await eventually(lambda: len(gateway.directory.llm_of(OTHER).admission) > 0)
    assert len(gateway.directory.llm_of(MODEL).admission) == 0
    for _ in range(5):
        answer = await http.post("/v1/completions", json=BODY, timeout=10.0)
        assert answer.status_code == 200
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_model_that_is_gone_for_good_takes_nothing_with_it(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its series go; what the gateway has done in all does not, of which the console shows rates."""
    monkeypatch.setattr("services.gateway.directory.roster.GONE_S", 0.5)
    await joined(gateway)
    for _ in range(3):
        assert (await http.post("/v1/completions", json=BODY | {"model": OTHER})).status_code == 200
    before = gateway.shared.metrics.totals()
    assert before.buckets(TTFT)[-1] == 3
    await leave(others, "other-d", "other-p")
    await eventually(lambda: OTHER not in gateway.directory.names)
    assert f'"{OTHER}"' not in (await http.get("/metrics")).text
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    after = gateway.shared.metrics.totals()
    assert (after.buckets(TTFT)[-1], after.count("tandem_requests")) == (4, 4)
    assert rates(before, after, 1.0)["requests_per_s"] == 1.0


@with_settings(models=(MODEL,))
async def test_a_gateway_of_one_model_serves_no_other(http: httpx.AsyncClient, others: Peers) -> None:
    await asyncio.sleep(1.0)
    assert names_of(await http.get("/v1/models")) == [MODEL]
    assert (await http.post("/v1/completions", json=BODY | {"model": OTHER})).status_code == 404


async def test_a_model_without_a_tokenizer_is_served_to_nobody_and_ready_says_why(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, tmp_path: Path
) -> None:
    (tmp_path / "other" / "tokenizer.json").unlink()
    others.model = "nothing"
    await others.add_decode("bare")
    await eventually(lambda: "bare" in gateway.directory.problems)
    (why,) = (await http.get("/health/ready")).json()["refused_workers"]
    assert why.startswith("bare: its model has no tokenizer.json")
    assert (await http.post("/v1/completions", json=BODY | {"model": "nothing"})).status_code == 404


async def test_a_model_whose_files_are_malformed_is_told_and_tried_again(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, tmp_path: Path
) -> None:
    (tmp_path / "other" / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    others.model = "broken"
    await others.add_decode("broken-d")
    await eventually(lambda: any("model broken" in why for why in gateway.directory.problems.values()))
    assert "tokenizer_config.json" in (await http.get("/health/ready")).text
    (tmp_path / "other" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    await leave(others, "broken-d")
    await others.add_decode("mended-d")
    await joined(gateway, "broken")
    assert gateway.directory.problems == {}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "once upon"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "once upon"}]}),
    ],
)
async def test_an_answer_names_the_revision_of_its_weights(
    http: httpx.AsyncClient, path: str, asked: dict[str, Any]
) -> None:
    body = {"model": MODEL, "max_tokens": 5, **asked}
    whole = await http.post(f"/v1/{path}", json=body)
    assert whole.json()["system_fingerprint"] == REVISION
    stream = await http.post(f"/v1/{path}", json=body | {"stream": True})
    events = [orjson.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert {event["system_fingerprint"] for event in events} == {REVISION}
