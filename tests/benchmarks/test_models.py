from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import LARGE, MOE, PER_TOKEN, SMALL, WINDOWS, Shape, made
from benchmarks.peers import gguf_file
from tests.benchmarks.conftest import TINY, TINY_MOE, TINY_WINDOWS


@pytest.mark.long
def test_a_made_model_is_one_that_transformers_loads(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters() if p.dim() == 2) == TINY.parameters
    assert model(torch.tensor([[300, 301]])).logits.shape == (1, 2, TINY.vocab)


def test_its_tokenizer_gives_text_back_and_fills_the_vocabulary(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text = "def naïve(x):\n    return x  # 日本"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == TINY.vocab
    assert AutoTokenizer.from_pretrained(tiny_model).eos_token_id == 0


@pytest.mark.long
def test_the_same_shape_gives_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    again = made(TINY, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()


def test_the_shapes_have_the_sizes_they_are_named_by() -> None:
    assert round(LARGE.parameters / 1e6) == 386
    assert round(SMALL.parameters / 1e6, 1) == 14.7
    assert round(WINDOWS.parameters / 1e6) == 268
    assert round(MOE.parameters / 1e6) == 327  # read for one token
    others = MOE.layers * (MOE.experts - PER_TOKEN) * 3 * MOE.hidden * MOE.intermediate
    assert round((MOE.parameters + others) / 1e9, 1) == 1.1


@pytest.mark.long
@pytest.mark.parametrize(("shape", "architecture"), [(TINY_MOE, "qwen3moe"), (TINY_WINDOWS, "gemma3")])
def test_a_made_model_of_another_family_is_what_llama_cpp_reads(
    shape: Shape, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have the names and sizes, and its numbers the meaning, that llama.cpp's own converter gives them."""
    monkeypatch.setattr(gguf_file, "OUT", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(made(shape, tmp_path / shape.name), dtype="auto")
    assert model(torch.tensor([[300, 301]])).logits.shape == (1, 2, shape.vocab)
    reader = gguf.GGUFReader(gguf_file.written(tmp_path / shape.name, "bf16"))
    says = {key: field.contents() for key, field in reader.fields.items()}
    assert says["general.architecture"] == architecture
    found = {tensor.name: tensor for tensor in reader.tensors}
    norm = torch.from_numpy(found["blk.1.attn_q_norm.weight"].data.copy())
    assert torch.equal(norm, torch.ones(shape.head_dim))
    if shape.experts:
        assert (says["qwen3moe.expert_count"], says["qwen3moe.expert_used_count"]) == (shape.experts, PER_TOKEN)
        down = gguf.dequantize(
            found["blk.1.ffn_down_exps.weight"].data, found["blk.1.ffn_down_exps.weight"].tensor_type
        )
        assert torch.equal(torch.from_numpy(down), model.model.layers[1].mlp.experts.down_proj.float())
        assert found["blk.1.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    else:
        assert says["gemma3.attention.sliding_window"] == shape.window
        assert says["gemma3.rope.freq_base"] == 1e6
        assert {"blk.6.post_attention_norm.weight", "blk.6.ffn_norm.weight", "blk.6.post_ffw_norm.weight"} <= {*found}
