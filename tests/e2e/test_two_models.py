"""One `tandem up` with two models, the demo model and a random one: each answers as one engine of it alone does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine import Engine, EngineConfig, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import RunningCluster, running_cluster
from tests.e2e.test_exact import oracle
from tests.engine.tiny import SIZES
from tests.gateway.tiny_model import TEMPLATE, byte_level_tokenizer

pytestmark = pytest.mark.long
DEMO, TINY = "demo", "tiny"
PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 320, "max_position_embeddings": 256}))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_model: Path, tiny: Path) -> Iterator[RunningCluster]:
    options = (f"--model={DEMO}={demo_model}", f"--model={TINY}={tiny}", f"--decode={TINY}=2")
    folder = tmp_path_factory.mktemp("two")
    with running_cluster(folder, *options, "--dtype=float32", "--disaggregation=require") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def engines(demo_model: Path, tiny: Path) -> dict[str, Engine]:
    config: dict[str, Any] = {"dtype": "float32", "num_blocks": 128, "enable_prefix_caching": False}
    folders = {DEMO: demo_model, TINY: tiny}
    return {
        name: Engine(EngineConfig(model_path=folder, model_name=name, **config)) for name, folder in folders.items()
    }


def test_both_answer_as_one_engine_of_each_does(cluster: RunningCluster, engines: dict[str, Engine]) -> None:
    """Side by side."""

    def ask(number: int) -> tuple[str, list[int], SamplingParams, list[int]]:
        name = (DEMO, TINY)[number % 2]
        tokens = httpx.post(f"{cluster.http}/tokenize", json={"model": name, "prompt": f"{PROMPT} {number}"}).json()
        plain = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        sampling = llm_pb2.SamplingParams(**plain, repetition_penalty=1.0, top_p=1.0)
        with grpc.insecure_channel(cluster.grpc) as channel:
            request = llm_pb2.GenerateRequest(model=name, prompt=f"{PROMPT} {number}", sampling=sampling)
            whole = llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(
                llm_pb2.GenerateUnaryRequest(generate=request), timeout=60
            )
        assert whole.path.decode_worker.startswith(f"{name}-decode-")
        assert whole.path.prefill_worker == f"{name}-prefill-0"
        return name, tokens["tokens"], SamplingParams(**plain), list(whole.token_ids)

    with ThreadPoolExecutor(8) as threads:
        for name, prompt, sampling, tokens in threads.map(ask, range(16)):
            assert tokens == oracle(engines[name], prompt, sampling)[0]


def test_what_there_is_is_told(cluster: RunningCluster) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{cluster.http}/v1/models").json()["data"]}
    assert set(cards) == {DEMO, TINY}
    assert {card["state"] for card in cards.values()} == {"ready"}
    assert cards[TINY]["max_model_len"] == 256
    models = httpx.get(f"{cluster.http}/health/ready").json()["models"]
    assert [models[name]["decode_workers"] for name in (DEMO, TINY)] == [1, 2]
    assert [models[name]["linked_pairs"] for name in (DEMO, TINY)] == [1, 2]
    told = httpx.post(f"{cluster.http}/v1/completions", json={"model": "x", "prompt": "x"})
    assert (told.status_code, f"models '{DEMO}', '{TINY}' are" in told.text) == (404, True)


@pytest.mark.parametrize("name", [DEMO, TINY])
def test_commands_take_a_model(cluster: RunningCluster, name: str) -> None:
    registry = ["--redis-url", cluster.redis_url, "--grpc-address", cluster.grpc, "--gateway-url", cluster.http]
    said = {
        "doctor": tandem("doctor", f"--model={name}", *registry).stdout,
        "generate": tandem("generate", "the", f"--model={name}", f"--address={cluster.grpc}", "--max-tokens=4").stdout,
        "chat": tandem("chat", name, f"--url={cluster.http}", "--max-tokens=4", stdin="hello\n").stdout,
    }
    assert f"{name}-decode-0" in said["doctor"]
    others = {DEMO, TINY} - {name}
    assert not any(f"{other}-decode-0" in said["doctor"] for other in others)
    assert f"{name}-decode" in said["chat"]


def test_each_user_of_an_alias_is_answered_by_one_engine(cluster: RunningCluster, engines: dict[str, Engine]) -> None:
    """By weights set at run time; the answer says which model it is of, and is that one's to the last token."""
    tandem("models", "alias", f"both={DEMO}:1,{TINY}:1", "--redis-url", cluster.redis_url)
    plain: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    sampling = llm_pb2.SamplingParams(**plain, repetition_penalty=1.0, top_p=1.0)
    found: dict[str, str] = {}
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = llm_pb2_grpc.LLMServiceStub(channel)
        wait_listed(stub, "both")
        for number in range(24):
            user, prompt = f"user {number % 12}", f"{PROMPT} {number}"
            request = llm_pb2.GenerateRequest(model="both", prompt=prompt, sampling=sampling, tenant=user)
            whole = stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request), timeout=60)
            name = whole.path.model
            assert (whole.model, found.setdefault(user, name)) == ("both", name)
            tokens = httpx.post(f"{cluster.http}/tokenize", json={"model": name, "prompt": prompt}).json()["tokens"]
            assert list(whole.token_ids) == oracle(engines[name], tokens, SamplingParams(**plain))[0]
    assert set(found.values()) == {DEMO, TINY}
    said = tandem("doctor", "--model=both", "--redis-url", cluster.redis_url, "--grpc-address", cluster.grpc).stdout
    assert all(f"{name}-decode-0" in said for name in (DEMO, TINY))
    tandem("models", "alias", f"both={TINY}:1", "--redis-url", cluster.redis_url)
    said = tandem("doctor", "--model=both", "--redis-url", cluster.redis_url).stdout
    assert (f"{DEMO}-decode-0" in said, f"{TINY}-decode-0" in said) == (False, True)
    tandem("models", "unalias", "both", "--redis-url", cluster.redis_url)


def wait_listed(stub: Any, name: str) -> None:
    """Gateways follow within two seconds."""
    end = time.monotonic() + 10
    while name not in {model.id for model in stub.ListModels(llm_pb2.ListModelsRequest(), timeout=10).models}:
        assert time.monotonic() < end
        time.sleep(0.05)


def tandem(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", *arguments]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, input=stdin)
    assert ended.returncode == 0, json.dumps([arguments, ended.stdout, ended.stderr])
    return ended
