"""LoRA adapters of a running cluster: loaded, used, migrated, swapped under load and unloaded; exact everywhere."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from transformers import AutoModelForCausalLM

from tandem.commands.up import DEMO_MODEL
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.checkpoints.hub_server import SHA, Hub, running_hub
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.engine.peft_folders import make_adapter, merged

pytestmark = pytest.mark.long
PROMPT = random.Random(5).choices(range(1, 4096), k=100)
NEW_TOKENS, LONG = 48, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in range(4):
        make_adapter(folder / f"a{seed}", DEMO_MODEL, rank=4 + seed, seed=seed, size=0.1)
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Hub]:
    """It has a0, too, and one that says it was made for another model."""
    a0 = {file.name: file.read_bytes() for file in (folder / "a0").iterdir()}
    said = json.loads(a0["adapter_config.json"]) | {"base_model_name_or_path": "somewhere/else-7b"}
    renamed = a0 | {"adapter_config.json": json.dumps(said).encode()}
    with running_hub({"org/sql": a0 | {"README.md": b"# It"}, "org/renamed": renamed, "org/half": {}}) as hub:
        yield hub


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, folder: Path, hub: Hub) -> Iterator[RunningCluster]:
    options = ["--dtype=float32", "--decode=2", "--disaggregation=prefer", f"--lora-dir={folder}", "--threads=1"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_ENDPOINT", hub.url)
        environment.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        with running_cluster(tmp_path_factory.mktemp("lora"), *options, "--lora-hub") as cluster:
            yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, list[int]]:
    """Answers of models with an adapter merged into their weights, and of the plain one."""
    found, model = {}, AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    for name in ("tandem-demo", "a0", "a1"):
        path = tmp_path_factory.mktemp("merged") / name
        shutil.copytree(DEMO_MODEL, path)
        if name in ("a0", "a1"):
            merged(model, folder / name).save_pretrained(path)
        config = EngineConfig(model_path=path, model_name="oracle", dtype="float32", num_blocks=64)
        engine = Engine(config)
        engine.add(Request("one", list(PROMPT), SamplingParams(max_tokens=LONG, temperature=0.0)))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        found[name] = [token.token_id for output in outputs for token in output.tokens]
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found


def post(cluster: RunningCluster, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{cluster.http}{path}", json=body, timeout=60)


def load(cluster: RunningCluster, name: str, path: str) -> httpx.Response:
    return post(cluster, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


def body(model: str) -> dict[str, object]:
    return {
        "model": model, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "top_p": 1,
        "repetition_penalty": 1, "return_token_ids": True,
    }  # fmt: skip


def answer(cluster: RunningCluster, model: str) -> list[int]:
    found = post(cluster, "/v1/completions", **body(model))
    assert found.status_code == 200, found.text
    ids: list[int] = found.json()["choices"][0]["token_ids"]
    return ids


def test_an_adapter_is_a_model(cluster: RunningCluster, expected: dict[str, list[int]]) -> None:
    """Remote and local prefill, mixed with the plain model in one batch, then not served any more."""
    assert post(cluster, "/v1/completions", **body("a0")).status_code == 404
    for name in ("a0", "a1"):
        assert load(cluster, name, name).json() == {"loaded": name}
    listed = httpx.get(f"{cluster.http}/v1/models").json()["data"]
    assert {card["id"]: card["parent"] for card in listed} == {
        "tandem-demo": None, "a0": "tandem-demo", "a1": "tandem-demo",
    }  # fmt: skip
    for _ in range(2):
        for name, tokens in expected.items():
            assert answer(cluster, name) == tokens[:NEW_TOKENS], name
    with grpc.insecure_channel(cluster.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        models = service.ListModels(llm_pb2.ListModelsRequest(), timeout=5).models
        assert {model.id: model.parent for model in models}["a1"] == "tandem-demo"
        service.UnloadLoraAdapter(llm_pb2.UnloadLoraAdapterRequest(lora_name="a1"), timeout=5)
        assert post(cluster, "/v1/completions", **body("a1")).status_code == 404
        service.LoadLoraAdapter(llm_pb2.LoadLoraAdapterRequest(lora_name="a1", lora_path="a1"), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            service.LoadLoraAdapter(llm_pb2.LoadLoraAdapterRequest(lora_name="b", lora_path="b"), timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert answer(cluster, "a1") == expected["a1"][:NEW_TOKENS]


def test_bad_adapters_are_refused(cluster: RunningCluster, folder: Path) -> None:
    for name, path, param, message in (
        ("x", "missing", "lora_path", "is no folder"),
        ("x", "../../etc", "lora_path", "is not below"),
        ("x", "hf://a0", "lora_path", "is not organisation/adapter"),
        ("x", "org/none", "lora_path", "has no such model"),
        ("x", "org/half", "lora_path", "has no adapter_config.json and no adapter_model.safetensors"),
        ("tandem-demo", "a0", "lora_name", "no name for an adapter"),
        ("", "a0", "lora_name", "no name for an adapter"),
    ):
        refused = load(cluster, name, path)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
        assert message in refused.json()["error"]["message"]
    assert post(cluster, "/v1/unload_lora_adapter", lora_name="x").status_code == 404


def test_adapters_come_from_a_hub_by_name(
    cluster: RunningCluster, hub: Hub, folder: Path, expected: dict[str, list[int]]
) -> None:
    """A name is pinned to the commit found; a base of another name is no reason to refuse what fits."""
    for name, path in (("named", "org/sql"), ("pinned", f"hf://org/sql@{SHA}"), ("renamed", "org/renamed@main")):
        loaded = load(cluster, name, path)
        assert loaded.status_code == 200, loaded.text
        assert answer(cluster, name) == expected["a0"][:NEW_TOKENS]
    assert "made for a model of another name" in (cluster.logs / "decode-0.log").read_text(encoding="utf-8")
    assert not [path for path, _ in hub.asked if path.endswith("README.md")]
    for name in ("named", "pinned", "renamed"):
        assert post(cluster, "/v1/unload_lora_adapter", lora_name=name).status_code == 200


async def test_adapters_are_swapped_under_load(cluster: RunningCluster, expected: dict[str, list[int]]) -> None:
    assert load(cluster, "a0", "a0").status_code == 200
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:

        async def ask(model: str) -> None:
            found = await client.post("/v1/completions", json=body(model))
            assert found.status_code == 200, found.text
            assert found.json()["choices"][0]["token_ids"] == expected[model][:NEW_TOKENS]

        asked = [asyncio.create_task(ask(model)) for model in ("a0", "tandem-demo") for _ in range(8)]
        for turn in range(6):
            name = f"a{2 + turn % 2}"
            found = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
            assert found.status_code == 200, found.text
            found = await client.post("/v1/completions", json=body(name) | {"max_tokens": 2})
            assert found.status_code == 200, found.text
            found = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert found.status_code == 200, found.text
        await asyncio.gather(*asked)


def test_an_adapted_answer_goes_on_elsewhere(cluster: RunningCluster, expected: dict[str, list[int]]) -> None:
    """On a decode worker that is killed in mid-answer; the one that takes over, and the one started anew, read it."""
    assert load(cluster, "a0", "a0").status_code == 200
    for _ in range(3):  # should the answer have ended before they were killed
        migrated, tokens = killed_in_mid_answer(cluster)
        assert tokens == expected["a0"]
        eventually(lambda: len(cluster.pids("decode")) == 2 and cluster.ready(), BOUND_S, "decode workers are back")
        if migrated:
            return
    pytest.fail("never killed in mid-answer")


def killed_in_mid_answer(cluster: RunningCluster) -> tuple[int, list[int]]:
    """How often the answer migrated, and its tokens."""
    tokens, victims = list[int](), cluster.pids("decode")
    with grpc.insecure_channel(cluster.grpc) as channel:
        sampling = llm_pb2.SamplingParams(
            max_tokens=LONG, temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
        )
        request = llm_pb2.GenerateRequest(model="a0", token_ids=llm_pb2.TokenIds(ids=PROMPT), sampling=sampling)
        for response in llm_pb2_grpc.LLMServiceStub(channel).Generate(request, timeout=120):
            if not tokens:
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
            tokens += response.token_ids
    return response.path.migrated, tokens
