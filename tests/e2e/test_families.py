"""A cluster of a model with windows: its tokens, also behind a worker's death, are the engine's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tandem.engine import Engine, EngineConfig, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, eventually, running_cluster
from tests.e2e.test_exact import oracle, prompt_of
from tests.e2e.test_migration import all_linked

pytestmark = pytest.mark.long
SIZES = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None, "sliding_window": 24,
}  # fmt: skip


def test_tokens_are_the_engines(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(5)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    engine = Engine(EngineConfig(folder, "oracle", dtype="float32", num_blocks=256, enable_prefix_caching=False))
    options = ("--dtype=float32", "--disaggregation=require", "--decode=2")
    with running_cluster(tmp_path, str(folder), *options) as cluster, grpc.insecure_channel(cluster.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        (last,) = answered(service, engine, [300], 40)
        assert last.path.transfer_bytes > 0
        (again,) = answered(service, engine, [300], 40)
        assert again.usage.cached_tokens > 0
        for _ in range(3):  # should it come when the answers of who is killed had ended: exact they are each time
            eventually(lambda: all_linked(cluster, 2), BOUND_S, "every pair has moved a block")
            kill = psutil.Process(cluster.pids("decode")[0]).kill
            if any(last.path.migrated for last in answered(service, engine, [301, 302, 303, 304], 400, kill)):
                return
    pytest.fail("never came in mid-answer")


def answered(
    service: llm_pb2_grpc.LLMServiceStub, engine: Engine, lengths: Sequence[int], count: int,
    disturb: Callable[[], None] = lambda: None,
) -> list[llm_pb2.GenerateResponse]:  # fmt: skip
    """The last responses to prompts of such lengths, which all are under way when `disturb` is called."""
    calls, lasts = [], []
    for length in lengths:
        sampling = llm_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        ids = llm_pb2.TokenIds(ids=prompt_of(length, seed=length))
        calls.append(
            service.Generate(llm_pb2.GenerateRequest(model="model", token_ids=ids, sampling=sampling), timeout=120)
        )
    begun = [next(call) for call in calls]
    disturb()
    ended = [[first, *call] for first, call in zip(begun, calls, strict=True)]  # before ours takes its time
    for length, responses in zip(lengths, ended, strict=True):
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        expected, _ = oracle(engine, prompt_of(length, seed=length), sampling)
        assert [token for response in responses for token in response.token_ids] == expected
        lasts.append(responses[-1])
    return lasts
