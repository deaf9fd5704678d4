"""Workers whose model takes other tokens for a text than the gateway's are refused, and /health/ready says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from services.gateway import Gateway
from tandem.checkpoints import differing, text_digests
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, REVISION, Peers

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 5}


def with_permuted_vocabulary(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    said = json.loads((to / "tokenizer.json").read_text())
    words = said["model"]["vocab"]
    first, second = list(words)[40:42]
    words[first], words[second] = words[second], words[first]
    (to / "tokenizer.json").write_text(json.dumps(said))
    return to


async def replace_by(peers: Peers, text: tuple[str, ...], *names: str) -> None:
    """Workers of that text instead of those of none."""
    peers.text_digests = text
    for name in names:
        await peers.workers[name].die()
        await peers.registry.deregister(name, peers.workers.pop(name).info.incarnation)
        await (peers.add_decode(name) if name == "d" else peers.add_prefill(name))


@pytest.fixture
def permuted(model_folder: Path, tmp_path: Path) -> tuple[str, ...]:
    return text_digests(with_permuted_vocabulary(model_folder, tmp_path / "other"))


async def test_a_gateway_of_another_vocabulary_is_not_ready_and_says_why(
    gateway: Gateway, peers: Peers, http: httpx.AsyncClient, permuted: tuple[str, ...]
) -> None:
    await replace_by(peers, permuted, "d", "p")
    await eventually(lambda: not gateway.llm.readiness()[0] and len(gateway.llm.pool.refused) == 2)
    ready = await http.get("/health/ready")
    assert ready.status_code == 503
    why = [f"{name}: other tokenizer.json than this gateway's" for name in ("d", "p")]
    assert ready.json()["refused_workers"] == why
    assert ready.json()["missing"] == [f"decode: no worker with an open stream; {'; '.join(why)}"]
    assert (await http.post("/v1/completions", json=BODY)).status_code == 503
    assert not peers.decode.seen


async def test_one_worker_of_another_vocabulary_gets_nothing(
    gateway: Gateway, peers: Peers, http: httpx.AsyncClient, permuted: tuple[str, ...], model_folder: Path
) -> None:
    await replace_by(peers, text_digests(model_folder), "d", "p")
    peers.text_digests = permuted
    foreign = await peers.add_decode("foreign")
    await eventually(lambda: gateway.llm.readiness()[0] and len(gateway.llm.pool.refused) == 1)
    assert gateway.llm.readiness()[1]["decode_workers"] == 1
    for _ in range(12):
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.headers["x-tandem-decode-worker"] == "d"
    assert not foreign.servicer.seen


CHANGED = {
    "tokenizer.json": ("tokenizer.json", "{}"),
    "tokenizer_config.json": ("tokenizer_config.json", '{"bos_token": "<t>"}'),
    "chat_template.jinja": ("chat_template.jinja", ""),
    "generation_config.json": ("generation_config.json", '{"eos_token_id": 0}'),
    "config.json": ("config.json", '{"max_position_embeddings": 64}'),
}


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_differs_is_named(model_folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    assert differing(text_digests(model_folder), text_digests(tmp_path)) == []
    file, content = CHANGED[name]
    (tmp_path / file).write_text(content)
    assert name in differing(text_digests(model_folder), text_digests(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert differing(text_digests(model_folder), text_digests(tmp_path)) == []


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
