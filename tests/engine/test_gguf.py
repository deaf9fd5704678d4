"""GGUF files: logits and tokens are those of transformers over the numbers that the `gguf` package opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer

from tandem.checkpoints.gguf import as_folder, folder_of
from tandem.checkpoints.gguf.config import FAMILIES, USUAL
from tandem.engine import Engine, EngineConfig, Request
from tandem.engine.models import Decoder, read_model_config
from tandem.engine.quantization.quantization import QuantizedWeight
from tandem.engine.weights.gguf_weights import BLOCKS, PLAIN
from tandem.engine.weights.loader import load_weights
from tests.engine.gguf_files import WORDS, make_file
from tests.engine.test_models import reference
from tests.engine.tiny import greedy, make_engine, run, sampled, tokens

NUM_TOKENS = 5
# llama.cpp's names of the architectures that are refused, by the family whose files have it.
OTHERS = {
    "phi3": "phi3", "olmo2": "olmo2", "granite": "granite", "smollm3": "smollm3", "glm": "chatglm", "glm4": "glm4",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "cohere": "command-r", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # fmt: skip
PROMPT = [7, 99, 140, 3, 201, 56, 11, 88, 35]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in (*PLAIN, *BLOCKS)),
        ("qwen2", "Q4_1"), ("qwen3", "Q8_0"), ("qwen2", "F16"), ("mistral", "F32"),
    ],
)  # fmt: skip
def test_logits_and_tokens_equal_transformers(family: str, kind: str, tmp_path: Path) -> None:
    model = make_file(tmp_path / "m.gguf", family, kind)
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    assert read_model_config(folder).model_type == family
    engine = make_engine(folder, num_blocks=32)
    engine.add(Request("a", PROMPT, greedy(NUM_TOKENS, logprobs=len(WORDS), ignore_eos=True)))
    output = run(engine)["a"]
    expected_ids, expected = reference(model, PROMPT, NUM_TOKENS)
    assert tokens(output) == expected_ids
    for row, token in zip(expected, sampled(output), strict=True):
        ids, values = zip(*token.top, strict=True)
        torch.testing.assert_close(torch.tensor(values), row[list(ids)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_that_are_kept_are_the_numbers_that_are_opened(kind: str, tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", kind)
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    config = read_model_config(folder)
    kept, opened = Decoder(config, torch.float32), Decoder(config, torch.float32)
    load_weights(kept, folder, keep_codes=True)
    load_weights(opened, folder)
    for (linear, _, _), (other, _, _) in zip(kept.fused(), opened.fused(), strict=True):
        assert isinstance(linear.weight, QuantizedWeight)
        assert isinstance(other.weight, torch.Tensor)
        assert linear.weight.bits == (4 if kind.startswith("Q4") else 8)
        assert torch.equal(linear.weight.dense(torch.float32), other.weight)
    assert isinstance(kept.lm_head, QuantizedWeight)
    assert kept.lm_head is kept.embed


def test_codes_are_told_of_as_they_load(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "Q4_K")
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(folder_of(tmp_path / "m.gguf", tmp_path / "cache"), "tiny", num_blocks=32)
    Engine(config, on_progress=lambda *progress: seen.append(progress))
    done = [progress[1] for progress in seen]
    assert len(set(done)) > 8
    assert done == sorted(done)
    assert seen[-1] == ("weights", done[-1], done[-1])


def test_a_folder_with_one_file_is_that_file_and_a_cache_may_be_read_only(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "Q8_0")
    assert (as_folder(tmp_path) / "tokenizer.json").is_file()
    assert (folder_of(tmp_path / "m.gguf", Path("/proc/cache")) / "tokenizer.json").is_file()


def test_parts_of_several_kinds_become_one(tmp_path: Path) -> None:
    """As in files that keep some layers in more bits: their q, k and v are one weight here."""
    make_file(tmp_path / "4.gguf", "qwen2", "Q4_K")
    make_file(tmp_path / "6.gguf", "qwen2", "Q6_K")
    four, six = (folder_of(tmp_path / f"{bits}.gguf", tmp_path / "cache") for bits in "46")
    entries, others = (json.loads((folder / "tensors.json").read_text(encoding="utf-8")) for folder in (four, six))
    joined = (four / "model.gguf").read_bytes()
    for name in ("blk.0.attn_v.weight", "blk.1.ffn_up.weight"):
        entry = others[name]
        data = (six / "model.gguf").read_bytes()[entry["offset"] : entry["offset"] + entry["nbytes"]]
        entries[name] = {**entry, "offset": len(joined)}
        joined += data
    mixed = tmp_path / "mixed"
    shutil.copytree(four, mixed, symlinks=True)
    (mixed / "model.gguf").unlink()
    (mixed / "model.gguf").write_bytes(joined)
    (mixed / "tensors.json").write_text(json.dumps(entries), encoding="utf-8")
    config = read_model_config(mixed)
    kept, opened = Decoder(config, torch.float32), Decoder(config, torch.float32)
    load_weights(kept, mixed, keep_codes=True)
    load_weights(opened, mixed)
    widths = set()
    for (linear, _, _), (other, _, _) in zip(kept.fused(), opened.fused(), strict=True):
        assert isinstance(linear.weight, QuantizedWeight)
        widths.add((linear.weight.bits, linear.weight.group))
        assert torch.equal(linear.weight.dense(torch.float32), other.weight)
    assert widths == {(4, 32), (8, 16)}


def test_words_and_template_come_from_its_metadata(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "F32", {"tokenizer.ggml.add_bos_token": True})
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    assert folder.name == "m"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello<|end|>").tokens == ["<|begin|>", "hello", "<|end|>"]
    text = "Grüße, hello  12 \n\n it's"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert said["bos_token"] == "<|begin|>"
    assert "m.role" in said["chat_template"]
    assert json.loads((folder / "generation_config.json").read_text(encoding="utf-8")) == {"eos_token_id": [1], **USUAL}
    assert folder_of(tmp_path / "m.gguf", tmp_path / "cache") == folder


def test_a_template_for_tools_comes_from_its_metadata_too(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "F32", {"tokenizer.chat_template.tool_use": "{{ tools | tojson }}"})
    said = json.loads(
        (folder_of(tmp_path / "m.gguf", tmp_path / "cache") / "tokenizer_config.json").read_text(encoding="utf-8")
    )
    assert [one["name"] for one in said["chat_template"]] == ["default", "tool_use"]
    assert said["chat_template"][1]["template"] == "{{ tools | tojson }}"


def test_a_file_or_what_lies_beside_it_says_how_to_sample(tmp_path: Path) -> None:
    file, beside = tmp_path / "m.gguf", tmp_path / "generation_config.json"
    make_file(file, "llama", "F32", {"general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    said = [json.loads((folder_of(file, tmp_path / "cache") / beside.name).read_text(encoding="utf-8"))]
    beside.write_text('{"temperature": 0.25, "max_new_tokens": 9, "do_sample": true}', encoding="utf-8")
    said.append(json.loads((folder_of(file, tmp_path / "cache") / beside.name).read_text(encoding="utf-8")))
    assert said[0] == {"eos_token_id": [1], **USUAL, "temperature": 0.5, "top_k": 20}
    assert said[1] == said[0] | {"temperature": 0.25, "max_new_tokens": 9}
    (tmp_path / "bytes").mkdir()
    (tmp_path / "m.gguf").rename(tmp_path / "bytes" / "0f0f")
    file.symlink_to(tmp_path / "bytes" / "0f0f")  # as a hub's cache has it
    linked = folder_of(file, tmp_path / "cache")
    assert linked.name == "m"
    assert json.loads((linked / beside.name).read_text(encoding="utf-8")) == said[1]
    beside.write_text('{"temperature": "hot"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature: "):
        folder_of(file, tmp_path / "cache")


def test_what_lies_beside_it_names_its_format_of_calls_and_nothing_else(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "F32", {})
    without = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tool_parser": "hermes", "chat_template": "another"}', encoding="utf-8"
    )
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    said, before = (
        json.loads((one / "tokenizer_config.json").read_text(encoding="utf-8")) for one in (folder, without)
    )
    assert said == {**before, "tool_parser": "hermes"}


def test_sentencepiece_words_are_merged_by_their_scores(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    scores = [0.0] * (len(words) - 2) + [-1.0, -2.0]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 5]
    says: dict[str, Any] = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": None, "tokenizer.ggml.pre": None,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    make_file(tmp_path / "m.gguf", "llama", "F32", says)
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab b").tokens == ["<s>", "▁ab", "▁", "b"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


@pytest.mark.parametrize(
    ("says", "message"),
    [
        *(
            ({"general.architecture": name}, f"general.architecture '{name}' is not one of llama, .*: serve the")
            for name in sorted({*OTHERS.values(), "mamba"})
        ),
        ({"llama.expert_count": 8}, "llama.expert_count: mixtures of experts are not supported: serve the model's"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn'"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count 32"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["hello"]}, "tokenizer.ggml.merges must be pairs"),
        ({"tokenizer.ggml.merges": ["x yzzy"]}, "tokenizer.ggml"),
        ({"llama.context_length": "long"}, "llama.context_length must be of type int"),
    ],
)
def test_what_cannot_be_served_is_named(says: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "F32", says)
    with pytest.raises(ValueError, match=rf"m\.gguf: {message}"):
        folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*"))


def test_damaged_files_are_errors_that_name_them(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "llama", "Q8_0")
    whole = (tmp_path / "m.gguf").read_bytes()
    for cut in (0, 3, 4, 20, 100, 1000, len(whole) // 4, len(whole) - 1):
        (tmp_path / "m.gguf").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"m\.gguf: is (not a GGUF file|damaged|cut short)"):
            folder_of(tmp_path / "m.gguf", tmp_path / "cache")


def test_architectures_have_the_names_that_files_have() -> None:
    assert {*OTHERS.values(), *FAMILIES} <= set(gguf.MODEL_ARCH_NAMES.values())
