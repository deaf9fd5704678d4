"""Chats of families on a real cluster, small random weights behind their own templates.

What such weights say is noise, so a form is asked for: it must come in the family's format, and tokens must be those of
one engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from openai import OpenAI
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tests.e2e.cluster import RunningCluster, running_cluster
from tests.engine.tiny import LATENT, SIZES, YARN
from tests.gateway.tiny_model import EOS, byte_level_tokenizer
from tests.gateway.tools import templates

pytestmark = pytest.mark.long
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
WIDE = {"vocab_size": 384, "max_position_embeddings": 2048}
MODELS = {
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **{**SIZES, **WIDE, "intermediate_size": 64}, head_dim=16, num_local_experts=6, num_experts_per_tok=2,
            sliding_window=8, rope_parameters=YARN | {"truncate": False},
        )
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**LATENT, **WIDE}, q_lora_rank=20, n_group=4, topk_group=2,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        )
    ),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**{**SIZES, **WIDE}, head_dim=8)),
}  # fmt: skip
TEMPLATES = {"gpt-oss": templates.HARMONY, "deepseek-v3": templates.DEEPSEEK_V31, "glm4": templates.GLM4}
SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "store", "parameters": SCHEMA}}]


def write(folder: Path, name: str) -> Path:
    torch.manual_seed(7)
    model: PreTrainedModel = MODELS[name]()
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str().replace(EOS, "<|endoftext|>"))
    words.add_special_tokens(list(MARKS))
    words.save(str(folder / "tokenizer.json"))
    ends = [0, *(words.token_to_id(mark) for mark in ("<|return|>", "<|call|>"))]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": ""}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    folder = write(tmp_path_factory.mktemp(request.param), request.param)
    options = ("--dtype=float32", "--disaggregation=require", f"--model-path={folder}", "--model-name=tiny")
    with running_cluster(tmp_path_factory.mktemp("logs"), *options) as cluster:
        yield request.param, folder, cluster


def test_tokens_equal_one_engine(served: tuple[str, Path, RunningCluster]) -> None:
    _, folder, cluster = served
    engine = Engine(EngineConfig(model_path=folder, model_name="oracle", dtype="float32", num_blocks=256))
    for length in (1, 16, 50, 200):
        prompt = [2 + (7 * i + length) % 300 for i in range(length)]
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60)
        assert answer.headers["x-tandem-path"] == "remote"
        moved = engine.layout.moved_bytes(-(-length // engine.layout.block_size))
        assert int(answer.headers["x-tandem-transfer-bytes"]) == moved
        engine.add(Request("one", prompt, SamplingParams(24, temperature=0.0, ignore_eos=True)))
        alone: list[int] = []
        while len(alone) < 24:
            alone += [token.token_id for output in engine.step() for token in output.tokens]
        assert answer.json()["choices"][0]["token_ids"] == alone


def test_a_call_that_must_be_made_is_one(served: tuple[str, Path, RunningCluster]) -> None:
    """By the model's template, its format and its reader; behind an earlier call and its result, too."""
    name, _, cluster = served
    history: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "store", "arguments": '{"n": 3}'}}
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "kept"},
        {"role": "user", "content": "again"},
    ]  # fmt: skip
    with OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for messages in (history[:1], history):
            for choice in ("required", {"type": "function", "function": {"name": "store"}}):
                asked: Any = {"model": "tiny", "messages": messages, "tools": TOOLS, "tool_choice": choice, "seed": 5}
                asked["extra_body"] = {"thinking_token_budget": 20} if name == "gpt-oss" else {}
                message = client.chat.completions.create(**asked, max_tokens=1200).choices[0].message
                for call in message.tool_calls or []:
                    assert call.type == "function"
                    assert call.function.name == "store"
                    assert 1 <= json.loads(call.function.arguments)["n"] <= 99
                assert message.tool_calls
                assert not message.content
