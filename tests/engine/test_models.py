"""Logits and greedy tokens are those of transformers, for every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.checkpoints.gguf import folder_of
from tandem.engine import Engine, EngineConfig, Request
from tandem.engine.models import Rope, read_model_config
from tandem.engine.weights.loader import shard_paths
from tandem.engine.weights.revision import weights_revision
from tests.engine.gguf_files import make_file
from tests.engine.tiny import FAMILIES, VOCAB, Families, generate, greedy, make_engine, prompt_of, run, sampled, tokens

NUM_TOKENS = 7
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 50)  # around blocks of 4 and chunks of 16


def reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the log-probabilities (num_tokens, vocab) they were chosen from."""
    ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            rows.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1))
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_tokens_equal_transformers(name: str, family: Families) -> None:
    model, path = family(name)
    engine = make_engine(path)
    for length in PROMPT_LENGTHS:
        engine.add(Request(str(length), prompt_of(length, length), greedy(NUM_TOKENS, logprobs=VOCAB)))
    outputs = run(engine)
    for length in PROMPT_LENGTHS:
        expected_ids, expected = reference(model, prompt_of(length, length), NUM_TOKENS)
        assert tokens(outputs[str(length)]) == expected_ids
        logprobs = torch.zeros(NUM_TOKENS, VOCAB)
        for row, token in zip(logprobs, sampled(outputs[str(length)]), strict=True):
            ids, values = zip(*token.top, strict=True)
            row[list(ids)] = torch.tensor(values)
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-4)


def test_bfloat16_stays_close_to_float32(family: Families) -> None:
    model, path = family("llama2")
    prompt = prompt_of(20)
    engine = make_engine(path, dtype="bfloat16")
    assert engine.kv_cache[0].dtype == torch.bfloat16
    engine.add(Request("a", prompt, greedy(1, logprobs=VOCAB)))
    top = dict(sampled(run(engine)["a"])[0].top)
    expected = reference(model, prompt, 1)[1][0].exp()
    probs = torch.tensor([top[token_id] for token_id in range(VOCAB)]).exp()
    assert (probs - expected).abs().sum() < 0.25


def test_auto_dtype_is_the_checkpoints(llama: Path) -> None:
    assert make_engine(llama, dtype="auto").layout.dtype == "float32"


def test_shards_equal_one_file(family: Families, tmp_path: Path) -> None:
    model, path = family("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(model_path=tmp_path, model_name="tiny", num_blocks=32)
    engine = Engine(config, on_progress=lambda *progress: seen.append(progress))
    assert generate(engine, prompt_of(9), greedy(9)) == generate(make_engine(path), prompt_of(9), greedy(9))
    done = [progress[1] for progress in seen]
    assert done == sorted(done)
    assert seen[-1] == ("weights", done[-1], done[-1])


def edited(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a model folder with a changed config; None removes a field."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return target


def test_old_and_new_rope_fields_mean_the_same(llama: Path, tmp_path: Path) -> None:
    new = read_model_config(llama)
    scaling = {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    old = read_model_config(edited(llama, tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling))
    assert old == new
    assert new.rope == Rope(500.0, "llama3", 8.0, 1.0, 4.0, 32)
    assert new.max_model_len == 128
    plain = read_model_config(edited(llama, tmp_path, rope_parameters=None, rope_theta=3.0))
    assert plain.rope == Rope(3.0)


def test_a_stretched_context_is_longer(family: Families) -> None:
    assert read_model_config(family("llama-biased")[1]).max_model_len == 256


def test_end_of_text_ids_come_from_the_generation_config_first(llama: Path, tmp_path: Path) -> None:
    edited(llama, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    assert read_model_config(tmp_path).eos_token_ids == {5, 6}
    (tmp_path / "generation_config.json").unlink()
    assert read_model_config(tmp_path).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type: 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.1}, "partial_rotary_factor: 0.1 of 8 channels"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "su"}}, "short_factor is missing"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm: true is not supported"),
        ({"model_type": "gemma2", "hidden_act": "silu"}, "hidden_act: 'silu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok: 3, of 2"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit: 5.0 is not supported"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob: True is not supported"),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 15}, "kv_lora_rank: 15, and qk_rope_head_dim 64"),
        ({"model_type": "deepseek_v3", "n_group": 8, "topk_group": 9, "n_routed_experts": 64}, "n_group: 8 groups"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, "topk_method: 'greedy'"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers: 1 of 3 layers"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types: 1 of 3 layers"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 3}, "layer_types: 'chunked_attention'"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_the_decoder_cannot_serve_is_refused(
    llama: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    changes.setdefault("hidden_act", None)
    path = edited(llama, tmp_path, **{"rope_parameters": None, **changes})
    with pytest.raises(ValueError, match=message):
        read_model_config(path)


def test_a_longer_context_than_the_models_is_refused(llama: Path) -> None:
    assert read_model_config(llama, 64).max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len: 129 is more than the model's 128"):
        read_model_config(llama, 129)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: None}, f"1 missing tensors: {UP}"),
        ({"model.layers.9.mlp.up_proj.weight": (1,)}, "1 extra tensors: model.layers.9.mlp.up_proj.weight"),
        ({UP: (47, 32)}, r"up_proj.weight has shape \[47, 32\], the config says \[48, 32\]"),
        ({"lm_head.weight": (1,), "model.rotary_emb.inv_freq": (1,)}, None),  # tied, and computed
    ],
)
def test_a_wrong_tensor_is_named(
    llama: Path, tmp_path: Path, changes: dict[str, tuple[int, ...] | None], message: str | None
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    for name, shape in changes.items():
        weights.pop(name, None)
        if shape is not None:
            weights[name] = torch.zeros(shape)
    save_file(weights, tmp_path / "model.safetensors")
    if message is None:
        make_engine(tmp_path)
        return
    with pytest.raises(ValueError, match=message):
        make_engine(tmp_path)


def test_a_missing_or_damaged_file_is_named(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors: "):
        make_engine(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors does not exist"):
        make_engine(tmp_path)


def test_revision_follows_the_weights(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    one = make_engine(llama).layout
    assert make_engine(tmp_path).layout.hash == one.hash
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    changed = make_engine(tmp_path).layout
    assert changed.revision != one.revision
    assert changed.hash != one.hash
    assert one.revision == weights_revision(llama, shard_paths(llama))
    assert make_engine(llama, revision="v1").layout.revision == "v1"


def test_every_byte_of_the_weights_is_in_their_revision(tmp_path: Path) -> None:
    """Uses a file of which 1,024 pages would be one byte in four."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(16 * 2**20))
    seen = {weights_revision(tmp_path, shard_paths(tmp_path))}
    for place in (0, 5_000, 2**22 - 1, 2**22, 9_999_999, 16 * 2**20 - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\1")
        seen.add(weights_revision(tmp_path, shard_paths(tmp_path)))
    assert len(seen) == 7


def test_bytes_that_move_to_another_file_are_another_revision(tmp_path: Path) -> None:
    def revision(*parts: bytes) -> str:
        for number, part in enumerate(parts):
            (tmp_path / f"{number}.safetensors").write_bytes(part)
        return weights_revision(tmp_path, [tmp_path / f"{number}.safetensors" for number in range(len(parts))])

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert len({revision(b"ab", b"c"), revision(b"a", b"bc"), revision(b"abc"), revision(b"abc", b"")}) == 4


@pytest.mark.parametrize("changed", ["model.gguf", "tensors.json"])
def test_a_gguf_file_is_in_its_revision_behind_the_link(changed: str, tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "Q8_0")
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    before = make_engine(folder).layout.revision
    content = bytearray((folder / changed).read_bytes())
    if changed == "model.gguf":
        content[-1] ^= 1
    else:
        content += b"\n"
    (folder / changed).unlink()
    (folder / changed).write_bytes(content)
    assert make_engine(folder).layout.revision != before
