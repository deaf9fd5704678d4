"""Every way a request can end badly: a typed error, soon, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.generation import Generation
from services.gateway.settings import Disaggregation
from tandem.local import RedisServer, free_ports
from tandem.registry import Role
from tandem.sampling import SamplingParams
from tandem.v1 import worker_pb2
from tests.gateway.conftest import TEXT, connected, eventually, make_settings
from tests.gateway.peers import MODEL, Peers

LONG = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 200, "ignore_eos": True}
SHORT = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 100}


async def everything_free(peers: Peers, gateway: Gateway) -> None:
    """I3: nothing is held on workers, in Redis or in the gateway. How soon, the fault explorer judges."""

    async def free() -> bool:
        held = any(
            getattr(p.servicer, "held", ()) or getattr(p.servicer, "running", ()) for p in peers.workers.values()
        )
        connections = [
            connection.running + len(connection.stream)
            for connection in gateway.directory.llm_of(None).pool._connections.values()
        ]
        inside = (
            gateway.directory.llm_of(None).admission.admitted.tokens
            or gateway.directory.llm_of(None).admission.check_integrity()
        )
        return not (held or any(connections) or gateway.shared.state.running or inside) and await peers.reserved() == 0

    await eventually(free)


async def test_integrity_names_what_no_answer_accounts_for(http: httpx.AsyncClient, gateway: Gateway) -> None:
    whole = (await http.get("/debug/integrity")).json()
    assert whole["whole"]
    assert whole["held"]["attempts"] == whole["held"]["mailboxes"] == 0
    connection = next(c for c in gateway.directory.llm_of(None).pool.connections if c.info.role is Role.DECODE)
    mailbox = connection.stream.attach("lost")
    broken = (await http.get("/debug/integrity")).json()
    assert broken["violations"] == [
        "1 mailboxes, and no answer runs",
        f"connection to {connection.info.worker_id}: 1 mailboxes of 0 attempts",
    ]
    connection.stream.detach(mailbox)


async def post(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await http.post("/v1/completions", json=body, headers=named)


def received(gateway: Gateway) -> int:
    """Tokens that the gateway has of the answer that has most."""
    streams = [connection.stream for connection in gateway.directory.llm_of(None).pool.connections]
    return max((mailbox.next_index for stream in streams for mailbox in stream._mailboxes.values()), default=0)


async def read_events(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


async def test_a_client_that_leaves_mid_stream(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.decode.step_s = 0.01
    async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        async for _ in read_events(answer):
            break
    await everything_free(peers, gateway)
    assert peers.decode.aborted == [peers.decode.seen[0].request_id]


async def test_a_client_that_leaves_while_its_prompt_is_prefilled(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    peers.prefill.hold.clear()
    request = asyncio.create_task(post(http, SHORT))
    await eventually(lambda: bool(peers.prefill.running))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await everything_free(peers, gateway)
    assert peers.prefill.cancelled == [peers.prefill.seen[0].request_id]


async def test_a_stream_that_cannot_be_written_is_opened_anew(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    """Else what is asked would never leave, on a stream that looks open."""
    stream = next(c for c in gateway.directory.llm_of(None).pool.connections if c.info.role is Role.DECODE).stream

    class BrokenMailbox(deque[Any]):
        def popleft(self) -> Any:
            stream._unsent = deque()
            raise RuntimeError("a bug")

    stream._unsent = BrokenMailbox([worker_pb2.WorkRequest()])
    stream._to_send.set()
    await eventually(lambda: not stream.open.is_set())
    await eventually(stream.open.is_set)
    assert (await post(http, SHORT)).status_code == 200
    await everything_free(peers, gateway)


async def test_a_request_is_over_once_both_workers_say_so(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    say, withheld = peers.prefill._say, list[Any]()
    monkeypatch.setattr(peers.prefill, "_say", lambda *message: withheld.append(message))
    peers.prefill.hold.clear()
    request = asyncio.create_task(post(http, SHORT))
    await eventually(lambda: bool(peers.prefill.running))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await eventually(lambda: bool(withheld) and not peers.decode.held)
    assert await peers.reserved() > 0
    for message in withheld:
        say(*message)
    await everything_free(peers, gateway)


async def test_a_request_cancelled_at_any_moment(gateway: Gateway, peers: Peers) -> None:
    """So many turns of the event loop after it began, or after its workers were chosen."""
    chosen = gateway.directory.llm_of(None).pipeline.cluster.router._offline._own
    for turns, after_choice in ((turns, after) for turns in range(60) for after in (False, True)):
        request = asyncio.create_task(first_tokens(gateway, f"r{turns}"))
        while after_choice and not chosen:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await eventually(lambda: not chosen)
    await everything_free(peers, gateway)


async def first_tokens(gateway: Gateway, name: str) -> None:
    now = asyncio.get_running_loop().time()
    request = Generation(
        operation="chat", request_id=name, model=gateway.directory.llm_of(None).model, prompts=[[5] * 20], n=1,
        given={}, sampling=SamplingParams(max_tokens=8), deadline=now + 20, arrived=now,
    )  # fmt: skip
    async with aclosing(gateway.directory.llm_of(None).answer(request, "prompt").deltas()) as deltas:
        await anext(deltas)


async def test_the_deadline_before_the_first_token(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.prefill.hold.clear()
    answer = await post(http, SHORT, x_request_timeout_ms="300")
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout"
    await everything_free(peers, gateway)


async def test_the_deadline_mid_stream(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    for timeout_s in (0.4, 2.0, 10.0):  # the longer ones where this machine stood still before any token
        peers.decode.step_s = timeout_s / 20
        headers = {"x-request-timeout": str(timeout_s)}
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers) as answer:
            parts = [part async for part in read_events(answer)]
        assert json.loads(parts[-1].removeprefix("data: "))["error"]["type"] == "timeout"
        await everything_free(peers, gateway)
        if answer.status_code == 200 and len(parts) > 3:
            return
    pytest.fail("no deadline passed behind some tokens")


async def test_a_client_that_does_not_read(gateway: Gateway, peers: Peers) -> None:
    """Its deadline ends it though nothing can be written any more."""
    peers.decode.step_s = 0
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 8}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout-ms: 3000\r\ncontent-length: %d\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.http_port, limit=1024)
    writer.write(head % len(body) + body)
    await writer.drain()
    await eventually(lambda: gateway.shared.state.accepted > 0)
    await eventually(lambda: not gateway.shared.state.running)
    await everything_free(peers, gateway)
    writer.close()


async def test_decode_dies_mid_stream(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.decode.step_s = 0.01
    async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        parts = read_events(answer)
        await anext(parts)
        await peers.workers["d"].die()
        rest = [part async for part in parts]
    error = json.loads(rest[-1])["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "worker_lost")
    await eventually(lambda: not gateway.shared.state.running)


@pytest.mark.usefixtures("patient")
async def test_an_answer_goes_on_when_its_stream_breaks(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    """On the same worker, if there is no other: behind the tokens that were sent."""
    whole = (await post(http, LONG)).json()["choices"][0]["text"]
    peers.decode.step_s = 0.01
    request = asyncio.create_task(post(http, LONG))
    await eventually(lambda: received(gateway) > 5)
    peers.decode.break_streams()
    answer = await request
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == whole
    first, second = peers.decode.seen[1:]
    assert second.num_prior_tokens > 1
    assert len(second.token_ids) == len(first.token_ids) + second.num_prior_tokens
    assert answer.headers["x-tandem-migrated"] == "1"
    assert answer.json()["usage"]["tandem"][0]["migrated"] == 1
    assert answer.json()["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert "tandem_migrations_total" in (await http.get("/metrics")).text


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("status", [grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL])
async def test_a_worker_that_ends_its_stream_has_not_crashed(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway, status: grpc.StatusCode
) -> None:
    """It took its gateway for dead, so it lives: nobody is suspected, whichever of both gRPC makes of that end."""
    peers.decode.step_s = 0.01
    request = asyncio.create_task(post(http, LONG))
    await eventually(lambda: received(gateway) > 5)
    peers.decode.last_status = status
    peers.decode.break_streams()
    assert (await request).status_code == 200
    assert [spec.alone_until for spec in peers.decode.seen] == [0, 0]


async def test_one_that_answers_is_chosen_before_a_silent_one_that_was_starved(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    """The silent one is waited for only where no other answers."""
    pool = gateway.directory.llm_of(None).pool
    peers.decode.ping(starvation=15.0)
    await eventually(lambda: bool(pool.doubtful()))
    answers = [await post(http, SHORT)]
    await peers.add_decode("d2")
    await eventually(lambda: gateway.readiness()[1]["linked_pairs"] == 2)
    await eventually(lambda: pool.doubtful() == {peers.decode.incarnation})
    answers += [await post(http, SHORT) for _ in range(4)]
    workers = [answer.json()["usage"]["tandem"][0]["decode_worker"] for answer in answers]
    assert workers == ["d", *["d2"] * 4]
    assert not pool.lost()


async def test_decode_dies_while_the_prompt_is_prefilled(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    """Nothing was sent yet: another decode worker takes over, and the prefill call of the first try is cancelled."""
    peers.prefill.hold.clear()
    request = asyncio.create_task(post(http, SHORT))
    await eventually(lambda: bool(peers.prefill.running))
    await peers.add_decode("d2")
    await eventually(lambda: gateway.readiness()[1]["linked_pairs"] == 2)
    await peers.workers["d"].die()
    await eventually(lambda: len(peers.prefill.seen) == 2)
    peers.prefill.hold.set()
    answer = await request
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-decode-worker"] == "d2"
    assert answer.json()["choices"][0]["text"] == TEXT
    first, second = (spec.request_id for spec in peers.prefill.seen)
    assert first != second
    assert peers.prefill.cancelled == [first]


@pytest.mark.parametrize("how", ["dies", "refuses", "loses its link"])
async def test_prefill_fails_and_decode_prefills_the_prompt(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway, how: str
) -> None:
    """The decode worker that tells of a lost link lives, and is not left out of the second try.

    It may tell of a death before the gateway's own stream to the prefill worker breaks: an open one acquits nobody.
    """
    peers.prefill.hold.clear()
    request = asyncio.create_task(post(http, SHORT))
    await eventually(lambda: bool(peers.prefill.running))
    if how == "dies":
        await peers.workers["p"].die()
    elif how == "loses its link":
        peers.decode.fail("UNAVAILABLE")
    else:
        peers.prefill.refuse = grpc.StatusCode.UNAVAILABLE
        peers.prefill.hold.set()
    answer = await request
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-path"] == "local"
    reason = answer.json()["usage"]["tandem"][0]["reason"]
    assert "excluded" in reason
    assert "after worker p: " in reason
    assert answer.json()["choices"][0]["text"] == TEXT
    assert peers.decode.senders == [peers.workers["p"].info.incarnation, ""]
    suspected = [spec.begins_apart for spec in peers.decode.seen]
    assert suspected == [False, how != "refuses"]
    await everything_free(peers, gateway)


async def test_a_second_failure_is_the_answer(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.decode.refuse = grpc.StatusCode.UNAVAILABLE
    answer = await post(http, SHORT)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_lost"
    await everything_free(peers, gateway)


async def test_a_deadline_in_the_second_attempt_is_a_deadline(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.prefill.refuse = grpc.StatusCode.UNAVAILABLE
    peers.decode.step_s = 10.0
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    answer = await http.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "500"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout")


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    ],
)
async def test_refusals_of_workers_have_a_status(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway, refusal: grpc.StatusCode, status: int
) -> None:
    peers.decode.refuse = refusal
    assert (await post(http, SHORT)).status_code == status
    peers.decode.refuse = None
    peers.prefill.refuse = refusal
    assert (await post(http, SHORT)).status_code == status
    await everything_free(peers, gateway)


async def test_a_failed_sequence(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.decode.step_s = 0.01
    request = asyncio.create_task(post(http, LONG))
    await eventually(lambda: bool(peers.decode.held))
    await asyncio.sleep(0.1)
    peers.decode.fail("INTERNAL")
    answer = await request
    assert answer.status_code == 500
    assert "failed for the test" in answer.json()["error"]["message"]
    await everything_free(peers, gateway)


async def test_a_missing_token_is_an_error(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.decode.skip_token = 4
    answer = await post(http, SHORT)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"
    assert "token 5" in answer.json()["error"]["message"]
    await everything_free(peers, gateway)


async def test_one_choice_that_fails_ends_the_others(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    peers.decode.step_s = 0.01
    request = asyncio.create_task(post(http, {**LONG, "n": 4}))
    await eventually(lambda: len(peers.decode.held) == 4)
    await asyncio.sleep(0.05)
    one, rest = next(iter(peers.decode.held.items())), list(peers.decode.held.items())[1:]
    peers.decode.held = dict([one])
    peers.decode.fail("INTERNAL")
    peers.decode.held = dict(rest)
    assert (await request).status_code == 500
    await everything_free(peers, gateway)


@pytest.mark.parametrize("same_port", [True, False])
@pytest.mark.usefixtures("patient")
async def test_a_restarted_decode_worker_serves_at_once(
    http: httpx.AsyncClient, peers: Peers, gateway: Gateway, same_port: bool
) -> None:
    """R1: the old incarnation's requests go on on the new one, and the first request to the new one succeeds. What
    listens at another port comes once a launcher has ended the old one's lease."""
    peers.decode.step_s = 0.02
    old = peers.workers["d"]
    async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        events = read_events(answer)
        await anext(events)
        await old.die()
        if not same_port:
            await peers.registry.leases.deregister("d", old.info.incarnation)
        new = await peers.add_decode(port=old.server.port if same_port else 0)
        peers.decode.step_s = 0
        *_, last = [event async for event in events]
    assert last == "[DONE]"
    assert gateway.directory.llm_of(None).pool.connected(new.info)
    after = await post(http, SHORT)
    assert after.status_code == 200, after.text
    assert [spec.num_prior_tokens > 0 for spec in peers.decode.seen] == [True, False]


async def test_redis_frozen_fails_no_request(
    model_folder: Path, settings: GatewaySettings, peers: Peers, registry_wait: Callable[[float], None]
) -> None:
    """The last view is served from, and the reason says so."""
    registry_wait(0.5)
    with RedisServer.start() as own:
        port = free_ports(1)[0]
        frozen = make_settings(own, disaggregation=Disaggregation.PREFER).model_copy(update={"http_port": port})
        await peers.move_to(own, frozen.namespace)
        async with make_gateway(frozen) as gateway, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            await eventually(lambda: gateway.readiness()[0])
            own.pause()
            try:
                answer = await http.post("/v1/completions", json=SHORT, timeout=60)
                await eventually(lambda: gateway.shared.view.stale)
                ready = await http.get("/health/ready")
            finally:
                own.resume()
            assert answer.status_code == 200, answer.text
            assert "registry unavailable" in answer.json()["usage"]["tandem"][0]["reason"]
            assert answer.headers["x-tandem-path"] == "remote"
            assert (ready.status_code, ready.json()["registry_reached"]) == (200, False)
            counted = 'tandem_fallbacks_total{path="remote",reason="registry_unavailable"} 1.0'
            assert counted in (await http.get("/metrics")).text


async def test_require_never_falls_back(model_folder: Path, redis: RedisServer, peers: Peers) -> None:
    settings = make_settings(redis, disaggregation=Disaggregation.REQUIRE)
    await peers.move_to(redis, settings.namespace)
    await peers.workers["p"].die()
    await peers.registry.leases.deregister("p", peers.workers["p"].info.incarnation)
    async with (
        make_gateway(settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}") as http,
    ):
        await eventually(lambda: connected(gateway, peers.workers["d"].info))
        assert (await http.get("/health/ready")).json()["missing"] == [
            "prefill: no worker with a proven link to a connected decode worker"
        ]
        answer = await post(http, SHORT)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_workers"
        assert "prefill" in answer.json()["error"]["message"]


async def test_a_request_waits_a_moment_for_links_that_are_opened_anew(
    model_folder: Path, redis: RedisServer, peers: Peers
) -> None:
    settings = make_settings(redis, disaggregation=Disaggregation.REQUIRE)
    peers.linked = False
    await peers.move_to(redis, settings.namespace)
    async with (
        make_gateway(settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}") as http,
    ):
        await eventually(lambda: connected(gateway, peers.workers["d"].info))
        refused = await post(http, SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_link")
        waiting = asyncio.create_task(post(http, SHORT))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        peers.linked = True
        assert (await waiting).status_code == 200


async def test_a_request_waits_a_moment_for_a_lease_to_be_renewed(
    http: httpx.AsyncClient, gateway: Gateway, peers: Peers
) -> None:
    """A starved worker's lease may end while it answers."""
    info = peers.workers["d"].info
    peers.decode.step_s = 0.05
    running = asyncio.create_task(post(http, SHORT | {"max_tokens": 60, "ignore_eos": True}))
    await eventually(lambda: bool(peers.decode.held))
    peers.workers["d"].heartbeat.cancel()
    await peers.registry.leases.heartbeat(info, peers._load(), 0.3)  # the last one for longer than that
    await eventually(lambda: all(worker.info.worker_id != "d" for worker in gateway.shared.view.workers))
    waiting = asyncio.create_task(post(http, SHORT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await peers.registry.leases.heartbeat(info, peers._load(), 60.0)
    assert [(await one).status_code for one in (waiting, running)] == [200, 200]
