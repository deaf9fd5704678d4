"""Every family is held to chunks, cached prompts, a draft model, adapters, int8, and KV and answers from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from services.gateway.tools import detect_format
from tandem.checkpoints import FAMILIES
from tandem.checkpoints.gguf.config import FAMILIES as OF_FILES
from tandem.engine import Engine, Request
from tandem.engine.models import read_model_config
from tandem.engine.models.families import FAMILY_FILES
from tandem.engine.quantization.quantization import quantize
from tandem.speculative import Speculative
from tests.engine import tiny
from tests.engine.peft_folders import make_adapter, merged
from tests.engine.test_gguf import OTHERS
from tests.engine.test_handoff import disaggregated
from tests.engine.test_migration import landed, numbered
from tests.engine.test_models import edited
from tests.engine.tiny import Families, assert_idle, generate, greedy, make_engine, prompt_of, run, tokens
from tests.gateway.tools.templates import OF_FAMILIES
from tests.marks import long_but

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ANSWER, BEGUN = 10, 4
PROMPT = prompt_of(38, 3)
LATENT = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
# The others are computed alike.
AT_ONCE = ("phi4-mini", "gemma3", "gpt-oss", "deepseek-v3")


def said_by(model: PreTrainedModel, count: int = ANSWER, prompt: list[int] = PROMPT) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def request(engine: Engine, name: str, adapter: str | None, method: str) -> Request:
    ref = engine.adapters.read(adapter, adapter) if engine.adapters and adapter else None
    return Request(
        name, list(PROMPT), greedy(ANSWER, ignore_eos=True), speculative=Speculative(method), lora=ref,
        adapter=engine.adapters.get(ref) if engine.adapters and ref else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", long_but(AT_ONCE, tiny.FAMILIES))
def test_tokens_are_the_same_by_all_that_saves_work(name: str, family: Families, tmp_path: Path) -> None:
    model, path = family(name)
    expected: dict[str | None, list[int]] = {None: said_by(model)}
    asked = [(None, "none"), (None, "draft")]
    if adapted := name not in LATENT:
        expected["a"] = said_by(merged(model, make_adapter(tmp_path / "a", path)))
        assert expected[None] != expected["a"]
        asked.insert(1, ("a", "draft"))
    engine = make_engine(
        path, now=lambda: 0.0, lora_dir=tmp_path if adapted else None, speculative_model=path, max_num_batched_tokens=24
    )
    for is_cached in (False, True):
        for of, method in asked:
            engine.add(request(engine, f"{of} {method}", of, method))
        outputs = run(engine)
        for of, method in asked:
            found = outputs[f"{of} {method}"]
            assert tokens(found) == expected[of], f"{of} {method}, {is_cached=}"
        assert (outputs["None none"][0].num_cached_tokens >= len(PROMPT) // 4 * 4) == is_cached
    assert engine.stats().num_accepted_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    long_but(
        [*((name, "auto") for name in tiny.FAMILIES), *((name, "int8") for name in AT_ONCE)],
        [(name, dtype) for name in tiny.FAMILIES for dtype in ("auto", "int8")],
    ),
)
def test_kv_and_answers_from_elsewhere_are_gone_on_with(name: str, kv_cache_dtype: str, family: Families) -> None:
    """Prefilled on one engine, decoded on another, twice: the second time both have most of the prompt cached. Then
    an answer that was begun there goes on in a third engine, which reads it, and in a fourth, where its KV lands."""
    path, kv = family(name)[1], {"kv_cache_dtype": kv_cache_dtype}
    source, target = make_engine(path, max_num_batched_tokens=10, **kv), make_engine(path, **kv)
    sampling = greedy(ANSWER, ignore_eos=True)
    expected = generate(make_engine(path, **kv), PROMPT, sampling)
    for _ in range(2):
        assert disaggregated(source, target, PROMPT, sampling) == expected
    begun = Request("r", [*PROMPT, *expected[:BEGUN]], sampling, num_prior_tokens=BEGUN)
    reader, lander = make_engine(path, **kv), make_engine(path, **kv)
    reader.add(begun)
    rest = list(enumerate(expected))[BEGUN:]
    assert numbered(run(reader)["r"]) == rest
    assert landed(source, lander, begun) == rest
    for engine in (source, target, reader, lander):
        assert_idle(engine)


def test_a_latent_is_all_that_is_held_of_a_token(family: Families) -> None:
    engine = make_engine(family("deepseek-v3")[1])
    assert engine.layout.block_bytes == 4 * (16 + 8) * 4  # tokens, numbers of a latent and of the turned key, float32
    assert engine.kv_cache[0][0].nbytes == engine.layout.block_bytes


def test_adapters_of_what_is_not_adapted_are_refused(family: Families, tmp_path: Path) -> None:
    for version in ("v2", "v3"):
        with pytest.raises(ValueError, match=f"adapters of deepseek_{version}, .* are not served: merge them"):
            make_engine(family(f"deepseek-{version}")[1], lora_dir=tmp_path)
    tensors = {f"model.layers.0.mlp.experts.0.{part}": torch.ones(1, 1) for part in ("w1.lora_A.weight",)}
    save_file(tensors, make_adapter(tmp_path / "a", family("mixtral")[1]) / "adapter_model.safetensors")
    adapters = make_engine(family("mixtral")[1], lora_dir=tmp_path).adapters
    assert adapters is not None
    with pytest.raises(ValueError, match="belongs to no linear layer of the model"):
        adapters.read("a", "a")


@torch.no_grad()
def rounded(model: PreTrainedModel) -> None:
    """Each linear layer of it, its head and an embedding that is the head, as int8 has them; what chooses experts, and
    how much is taken of them, stays."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("shared_expert_gate"):
            module.weight.copy_(quantize(module.weight, "int8").dense(torch.float32))
    for name, stacked in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for weight in stacked:
                weight = weight.T if model.config.model_type == "gpt_oss" else weight
                weight.copy_(quantize(weight, "int8").dense(torch.float32))


@pytest.mark.parametrize("name", long_but(AT_ONCE, tiny.FAMILIES))
def test_int8_says_what_the_rounded_model_says(name: str, family: Families, tmp_path: Path) -> None:
    path = family(name)[1]
    model = tiny.make(name)
    rounded(model)
    assert generate(make_engine(path, quantization="int8"), PROMPT, greedy(ANSWER, ignore_eos=True)) == said_by(model)


def test_long_factors_turn_where_contexts_may_be_long(tmp_path: Path) -> None:
    """As transformers turns contexts that are longer than the original ones, of which it takes the others otherwise."""
    model = tiny.make("phi4-mini")
    model.config.original_max_position_embeddings = 16
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    long = said_by(again)
    assert generate(make_engine(tmp_path), PROMPT, greedy(ANSWER, ignore_eos=True)) == long
    short, engine = prompt_of(9), make_engine(tmp_path, max_model_len=16)
    assert generate(engine, short, greedy(5)) == said_by(again, 5, short)
    assert engine.layout.hash != make_engine(tmp_path).layout.hash  # such keys are no good for the other


def test_windows_are_of_the_layers_that_have_one_and_shorter_than_a_context(family: Families, tmp_path: Path) -> None:
    windows = {name: read_model_config(family(name)[1]).windows for name in tiny.FAMILIES}
    assert {name: found for name, found in windows.items() if found} == {
        "mistral-window": (8, 8, 8), "qwen2-window": (0, 9, 9), "smollm3": (0, 11, 0), "gemma2": (8, 0, 8),
        "gemma3": (8, 0, 8), "gpt-oss": (8, 0, 8),
    }  # fmt: skip
    assert read_model_config(family("gemma3")[1], 8).windows == ()
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    path = edited(family("gemma3")[1], tmp_path, layer_types=kinds)
    assert read_model_config(path, 8).local_layers == {1, 2}
    assert read_model_config(path).windows == (0, 8, 8)


def test_old_fields_of_gemma3_mean_what_the_new_ones_mean(family: Families, tmp_path: Path) -> None:
    new = read_model_config(family("gemma3")[1])
    old = edited(
        family("gemma3")[1], tmp_path, rope_parameters=None, layer_types=None, rope_theta=10000.0,
        rope_local_base_freq=10000.0, rope_scaling={"rope_type": "linear", "factor": 2.0}, sliding_window_pattern=2,
    )  # fmt: skip
    assert read_model_config(old) == new


@torch.no_grad()
def test_mxfp4_experts_are_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    """In a checkpoint as gpt-oss is published: codes of 4 bits and exponents; the reference has their numbers."""
    model, chance = tiny.make("gpt-oss"), torch.Generator().manual_seed(1)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=chance)
            scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8, generator=chance)
            low, high = numbers[(blocks % 16).int()], numbers[(blocks // 16).int()]
            found = torch.stack((low, high), dim=-1).flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
            parameter.copy_(found.flatten(-2).transpose(1, 2))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    path = edited(tmp_path, tmp_path / "packed", quantization_config={"quant_method": "mxfp4"})
    assert generate(make_engine(path), PROMPT, greedy(ANSWER, ignore_eos=True)) == said_by(model)
    with pytest.raises(ValueError, match="quantization: int8, but the checkpoint is quantized already"):
        make_engine(path, quantization="int8")


def test_families_are_named_alike_where_there_is_no_torch() -> None:
    assert tuple(FAMILY_FILES) == FAMILIES


def table() -> dict[str, dict[str, str]]:
    """The rows of docs/models.md's table of families: cells by column."""
    lines = PAGE.read_text(encoding="utf-8").partition("| model_type |")[2].partition("\n\n")[0].splitlines()
    columns, _, *rows = [[cell.strip().strip("`") for cell in line.split("|")] for line in lines]
    return {row[1]: dict(zip(columns[:-1], row[2:-1], strict=True)) for row in rows}


def test_the_table_of_families_says_what_is_so(family: Families, tmp_path: Path) -> None:
    """Each column of which all cells say "yes" is of a test above, or in test_models.py, over all families."""
    rows = table()
    assert tuple(rows) == FAMILIES
    served = {read_model_config(path).model_type: path for path in (family(name)[1] for name in tiny.FAMILIES)}
    assert {*served} == {*FAMILIES}
    for name, row in rows.items():
        files = "llama" if name in ("llama", "mistral") else name
        chat, template = OF_FAMILIES[name]
        assert row == {
            **dict.fromkeys(("logits", "remote", "migrated", "prefix", "int8"), "yes"),
            "LoRA": adapted(served[name], tmp_path), "GGUF": files if files in OF_FILES else "refused", "chat": chat,
            "tools": detect_format(template) or "forced",
        }  # fmt: skip
        assert (files in OF_FILES) is (name not in {"mixtral", *OTHERS})


def adapted(path: Path, folder: Path) -> str:
    try:
        make_engine(path, lora_dir=folder)
    except ValueError:
        return "refused"
    return "attention" if read_model_config(path).experts else "yes"
