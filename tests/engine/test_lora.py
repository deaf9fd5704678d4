"""LoRA adapters: what they say equals the model with them merged in, whatever else is in the batch."""

from __future__ import annotations

import ctypes
import gc
import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.engine import Engine, Request
from tandem.engine.forward.forward import StepInput, TorchForward
from tandem.engine.kernels import CpuForward
from tandem.engine.lora import AdapterStoreFull, Base, read_adapter
from tandem.engine.models import Decoder, read_model_config
from tandem.engine.weights.loader import load_weights
from tandem.speculative import Speculative
from tests.engine.peft_folders import make_adapter, merged
from tests.engine.tiny import Families, generate, greedy, make_engine, prompt_of, run, tokens

PROMPT = prompt_of(21)


def request(engine: Engine, name: str, path: str, prompt: list[int] = PROMPT, **said: Any) -> Request:
    assert engine.adapters is not None
    ref = engine.adapters.read(name, path)
    return Request(name, list(prompt), greedy(10), lora=ref, adapter=engine.adapters.get(ref), **said)


@pytest.mark.parametrize(
    ("family_name", "made"),
    [
        ("llama3", {"rank": 4}),
        ("qwen2", {"rank": 1, "targets": ("q_proj", "v_proj")}),
        ("qwen3", {"rank": 8, "use_rslora": True}),
        ("llama-biased", {"rank": 3, "targets": ("k_proj", "up_proj", "down_proj")}),
    ],
)
def test_tokens_equal_those_of_merged_weights(
    family: Families, tmp_path: Path, family_name: str, made: dict[str, Any]
) -> None:
    model, path = family(family_name)
    adapter = make_adapter(tmp_path / "adapters" / "one", path, **made)
    merged(model, adapter).save_pretrained(tmp_path / "merged")
    expected = generate(make_engine(tmp_path / "merged"), PROMPT, greedy(10))
    engine = make_engine(path, lora_dir=tmp_path / "adapters")
    assert generate(engine, PROMPT, greedy(10)) != expected
    engine.add(request(engine, "one", "one"))
    assert tokens(run(engine)["one"]) == expected


def test_a_batch_mixes_adapters_and_none(family: Families, tmp_path: Path) -> None:
    """With one prompt for all, so that a block shared by mistake would show."""
    path = family("llama3")[1]
    for seed in range(4):
        make_adapter(tmp_path / f"a{seed}", path, rank=2 + seed, seed=seed)
    engine = make_engine(path, lora_dir=tmp_path)
    alone = {"none": generate(engine, PROMPT, greedy(10))}
    for seed in range(4):
        engine.add(request(engine, f"a{seed}", f"a{seed}"))
        alone |= {name: tokens(outputs) for name, outputs in run(engine).items()}
    assert len({tuple(found) for found in alone.values()}) == 5
    together = make_engine(path, lora_dir=tmp_path)
    for seed in range(4):
        together.add(request(together, f"a{seed}", f"a{seed}"))
    together.add(Request("none", list(PROMPT), greedy(10), speculative=Speculative("ngram")))
    assert {name: tokens(outputs) for name, outputs in run(together).items()} == alone
    again = request(together, "a2", "a2")
    together.add(again)
    found = run(together)["a2"]
    assert tokens(found) == alone["a2"]
    assert found[0].num_cached_tokens == 20


def test_kernels_compute_what_torch_does(library: ctypes.CDLL, tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = Qwen3Config(**sizes, head_dim=32, vocab_size=96, num_hidden_layers=2, max_position_embeddings=64)
    Qwen3ForCausalLM(made).bfloat16().save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    place = torch.empty(0, dtype=torch.bfloat16)
    base = Base(config, frozenset())
    adapters = [
        read_adapter(make_adapter(tmp_path / "one", tmp_path, rank=5, size=0.2), base, place),
        None,
        read_adapter(make_adapter(tmp_path / "two", tmp_path, rank=16, targets=("v_proj", "up_proj")), base, place),
        None,
    ]
    counts = [7, 5, 1, 2]
    rows = sum(counts)
    step = StepInput(
        torch.arange(rows) * 5 % 96, torch.cat([torch.arange(n) for n in counts]),
        torch.cat([16 * i + torch.arange(n) for i, n in enumerate(counts)]), counts,
        lengths=array("q", counts), tables=[[i] for i in range(4)], adapters=adapters,
    )  # fmt: skip
    caches = [[torch.zeros(4, 2, 2, 16, 32, dtype=torch.bfloat16) for _ in range(2)] for _ in range(3)]
    models = [Decoder(config, torch.bfloat16) for _ in range(2)]
    for model in models:
        load_weights(model, tmp_path)
    with torch.inference_mode():
        expected = TorchForward(models[0], caches[0])(step).float()
        plain = TorchForward(models[0], caches[1])(replace(step, adapters=())).float()
        forward = CpuForward(library, models[1], caches[2], 32)
        found = forward(step).float().clone()
        alone = forward(replace(step, adapters=())).float()
    adapted = torch.tensor([True] * 7 + [False] * 5 + [True] + [False] * 2)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    moved = (plain - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.03
    assert moved[adapted].min() > 0.1
    assert torch.equal(found[~adapted], alone[~adapted])


def _edit(**said: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        (folder / "adapter_config.json").write_text(json.dumps(config | said), encoding="utf-8")

    return edit


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return edit


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
BAD: list[tuple[Callable[[Path], None], str]] = [
    (_edit(peft_type="IA3"), "peft_type: 'IA3' is not LORA"),
    (_edit(use_dora=True), "use_dora: True is not supported"),
    (_edit(bias="all"), "bias: 'all' is not supported"),
    (_edit(r=512), "r: 512 is not a rank between 1 and 256"),
    (_edit(lora_alpha=None), "lora_alpha: None is not a number"),
    (_edit(alpha_pattern=["q_proj"]), "alpha_pattern: must be numbers by patterns of names"),
    (_edit(alpha_pattern={"q_proj": "8"}), "alpha_pattern: must be numbers by patterns of names"),
    (_edit(alpha_pattern={"q_proj(": 8}), r"alpha_pattern: 'q_proj\(' is no pattern: "),
    (_tensors(lambda t: t.update({A: t[A][:, :-1].contiguous()})), r"layers.1.self_attn.q_proj: A and B have shapes"),
    (_tensors(lambda t: t.update({A: t[A].to(torch.int8)})), "lora_A.weight is of int8, not of float32"),
    (_tensors(lambda t: t.update({A: t[A] * torch.inf})), "lora_A.weight has numbers that are not finite"),
    (_tensors(lambda t: t.__delitem__(A)), r"layers.1.self_attn.q_proj has lora_B without the other"),
    (_tensors(lambda t: t.update(lm_head=t[A].clone())), "tensor lm_head belongs to no linear layer"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: No such file"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "adapter_model.safetensors: "),
    (
        lambda folder: (folder / "adapter_config.json").write_text("{", encoding="utf-8"),
        "adapter_config.json: Expecting",
    ),
]


def test_bad_adapters_are_refused_by_name_and_reason(llama: Path, tmp_path: Path) -> None:
    engine = make_engine(llama, lora_dir=tmp_path)
    assert engine.adapters is not None
    for number, (spoil, message) in enumerate(BAD):
        spoil(make_adapter(tmp_path / str(number), llama))
        with pytest.raises(ValueError, match=message):
            engine.adapters.read("bad", str(number))
    others = ("none", "is no folder"), ("/etc", "is not below"), ("hf://org/a", "started with --lora-hub")
    for path, message in (("../up", "is not below"), *others):
        with pytest.raises(ValueError, match=f"lora_path: .*{message}"):
            engine.adapters.read("bad", path)


def test_the_store_keeps_the_latest_used_within_its_budget(llama: Path, tmp_path: Path) -> None:
    for seed in range(4):
        make_adapter(tmp_path / f"a{seed}", llama, seed=seed)
    size = read_adapter(tmp_path / "a0", Base(read_model_config(llama), frozenset()), torch.empty(0)).nbytes
    store = make_engine(llama, lora_dir=tmp_path, lora_memory=2 * size).adapters
    assert store is not None
    refs = [store.read(f"a{i}", f"a{i}") for i in range(3)]
    assert store.held() == (refs[1].revision, refs[2].revision)
    store.get(refs[1])
    in_use = store.get(refs[0])
    assert store.held() == (refs[1].revision, refs[0].revision)
    also = store.get(refs[1])
    with pytest.raises(AdapterStoreFull, match="lora_memory: no room"):
        store.get(refs[2])
    del in_use
    gc.collect()
    assert store.get(refs[2]).revision == refs[2].revision
    assert also.revision == refs[1].revision
    make_adapter(tmp_path / "a0", llama, seed=9)
    del also
    with pytest.raises(ValueError, match="adapter 'a0' in a0 has changed"):
        store.get(refs[0])
