"""Heads of a checkpoint propose what their networks say, from any state, and answers are the same without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tandem.engine import Engine, Request, SamplingParams
from tandem.speculative import Speculative
from tests.engine.head_folders import KINDS, TAPPED, make_heads
from tests.engine.test_handoff import CopySink
from tests.engine.test_kernels import WIDE
from tests.engine.tiny import Families, assert_idle, can_compile, generate, greedy, make_engine, prompt_of, run, tokens

PAIR = frozenset({30, 62})  # of two tokens heads are often right
SAMPLINGS = {
    "greedy": greedy(24),
    "seeded": SamplingParams(24, temperature=1.2, seed=4),
    "one of two": greedy(24, allowed_token_ids=PAIR),
    "one of two, seeded": SamplingParams(24, temperature=1.5, seed=9, allowed_token_ids=PAIR),
}


def still() -> float:
    return 0.0


def method_of(kind: str) -> str:
    return kind.partition("-")[0]


@pytest.fixture(scope="module")
def made(family: Families, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    found: dict[str, tuple[Path, dict[str, Tensor]]] = {}

    def get(kind: str) -> tuple[Path, dict[str, Tensor]]:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = folder, make_heads(kind, folder, family("llama3")[0])
        return found[kind]

    return get


def with_heads(llama: Path, folder: Path, kind: str, **config: Any) -> Engine:
    ahead = Speculative(method_of(kind), 4)
    return make_engine(llama, now=still, speculative_model=folder, speculative=ahead, **config)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_plain_decodings(llama: Path, made: Callable[[str], tuple[Path, Any]], kind: str) -> None:
    """Several at once, prefilled in chunks, with preemptions, and with a prompt that is cached."""
    plain, ahead = make_engine(llama), with_heads(llama, made(kind)[0], kind, num_blocks=22)
    prompts = [prompt_of(length, length) for length in (3, 17, 40)]
    for sampling in SAMPLINGS.values():
        for number, prompt in enumerate(prompts):
            ahead.add(Request(str(number), prompt, sampling))
        found = run(ahead)
        for number, prompt in enumerate(prompts):
            assert tokens(found[str(number)]) == generate(plain, prompt, sampling)
        assert_idle(ahead)
    stats = ahead.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_propose_is_what_their_networks_say(
    llama: Path, family: Families, made: Callable[[str], tuple[Path, dict[str, Tensor]]], kind: str
) -> None:
    """Step after step, with tokens refused and accepted before; the networks are transformers' layers here."""
    engine, (_, tensors) = with_heads(llama, made(kind)[0], kind), made(kind)
    proposer = engine._speculator._proposers[method_of(kind)]
    seen: list[tuple[list[int], list[int]]] = []
    propose = proposer.propose

    def spied(wanted: Any) -> bool:
        usual = propose(wanted)
        seen.extend((list(seq.token_ids), list(seq.proposed)) for seq, _ in wanted)
        return usual

    proposer.propose = spied  # type: ignore[method-assign]
    generate(engine, prompt_of(75, 3), SAMPLINGS["one of two"])
    assert len({len(known) - len(before) for (before, _), (known, _) in pairwise(seen)}) > 1  # some were right
    say = {"medusa": medusa_says, "eagle": eagle_says, "eagle3": eagle3_says}[method_of(kind)]
    for known, proposed in seen:
        assert len(proposed) == min(4, 3 if method_of(kind) == "medusa" else 4, 75 + 24 - len(known) - 1)
        with torch.no_grad():
            assert proposed == say(family("llama3")[0], renamed(tensors), known, len(proposed))


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("midlayer.").removeprefix("layers.0."): tensor for name, tensor in tensors.items()}


def best(logits: Tensor) -> int:
    return max(sorted(PAIR), key=lambda token_id: float(logits[token_id]))


def states(model: PreTrainedModel, ids: list[int]) -> tuple[Tensor, ...]:
    """The states that went into each layer, and the last ones, normed, (tokens, hidden) each."""
    found = model.float().model(torch.tensor([ids]), output_hidden_states=True)
    return *(state[0] for state in found.hidden_states[:-1]), found.last_hidden_state[0]


def medusa_says(model: PreTrainedModel, tensors: dict[str, Tensor], known: list[int], count: int) -> list[int]:
    feature, found = states(model, known)[-1][len(known) - 2], []
    for head in range(count):
        weight, bias, out = list(tensors.values())[3 * head : 3 * head + 3]
        found.append(best(out @ (feature + F.silu(weight @ feature + bias))))
    return found


def layer_of(model: PreTrainedModel, tensors: dict[str, Tensor], inputs: int) -> LlamaDecoderLayer:
    config = LlamaConfig(**model.config.to_dict() | {"attn_implementation": "eager"})
    layer = LlamaDecoderLayer(config, 0)
    for name in "qkv":
        old = getattr(layer.self_attn, f"{name}_proj")
        setattr(layer.self_attn, f"{name}_proj", nn.Linear(inputs, old.out_features, bias=False))
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(("self_attn", "mlp", "post_"))}
    layer.load_state_dict(own | {"input_layernorm.weight": layer.input_layernorm.weight})
    return layer


def attended(model: PreTrainedModel, layer: LlamaDecoderLayer, x: Tensor) -> Tensor:
    size = len(x)
    angles = LlamaRotaryEmbedding(model.config)(x, torch.arange(size)[None])
    mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
    out: Tensor = layer.self_attn(x[None], position_embeddings=angles, attention_mask=mask)[0][0]
    return out


def eagle_says(model: PreTrainedModel, tensors: dict[str, Tensor], known: list[int], count: int) -> list[int]:
    layer, embed = layer_of(model, tensors, model.config.hidden_size), tensors["embed_tokens.weight"]
    features, ids = states(model, known)[-1][: len(known) - 1], list(known)
    for _ in range(count):
        x = F.linear(torch.cat([embed[ids[1:]], features], 1), tensors["fc.weight"], tensors["fc.bias"])
        x = x + attended(model, layer, x)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        ids.append(best(model.lm_head(x[-1])))
        features = torch.cat([features, x[-1:]])
    return ids[len(known) :]


def eagle3_says(model: PreTrainedModel, tensors: dict[str, Tensor], known: list[int], count: int) -> list[int]:
    layer, embed = layer_of(model, tensors, 2 * model.config.hidden_size), model.get_input_embeddings().weight
    found = states(model, known)
    three = torch.cat([found[at] for at in TAPPED], 1)[: len(known) - 1]
    features, ids = three @ tensors["fc.weight"].T, list(known)
    for _ in range(count):
        normed = [
            F.rms_norm(x, x.shape[1:], tensors[f"{name}.weight"], model.config.rms_norm_eps)
            for x, name in ((embed[ids[1:]], "input_layernorm"), (features, "hidden_norm"))
        ]
        x = features + attended(model, layer, torch.cat(normed, 1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = F.rms_norm(x[-1], x.shape[1:], tensors["norm.weight"], model.config.rms_norm_eps)
        logits = torch.full((model.config.vocab_size,), -1e9)
        logits[torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = tensors["lm_head.weight"] @ last
        ids.append(best(logits))
        features = torch.cat([features, x[-1:]])
    return ids[len(known) :]


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_after_a_hand_off_and_a_migration_they_go_on_from_there(
    llama: Path, made: Callable[[str], tuple[Path, Any]], kind: str
) -> None:
    source, one = make_engine(llama), make_engine(llama)
    target, sampling, prompt = with_heads(llama, made(kind)[0], kind), SAMPLINGS["one of two"], prompt_of(30, 2)
    expected = generate(one, prompt, sampling)
    for written in (0, 7):
        going_on = Request("r", prompt + expected[:written], sampling, num_prior_tokens=written)
        target.reserve(going_on)
        source.add(going_on, sink=CopySink.of(target, "r"), prefill_only=True)
        (first,) = run(source)["r"]
        target.join("r", first.tokens[0])
        outputs = run(target)["r"]
        assert tokens([first, *outputs]) == expected[written:]
        assert outputs[-1].num_accepted_tokens > 0


@pytest.mark.skipif(not can_compile(), reason="no CPU with AVX512-BF16, or no C compiler")
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_with_the_compiled_kernels(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes = WIDE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model, folder = LlamaForCausalLM(LlamaConfig(**sizes)), tmp_path / "heads"
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    folder.mkdir()
    make_heads(kind, folder, model)
    plain = make_engine(tmp_path, dtype="bfloat16")
    ahead = with_heads(tmp_path, folder, kind, dtype="bfloat16")
    for sampling in (SAMPLINGS["one of two, seeded"], SAMPLINGS["seeded"]):
        assert generate(ahead, prompt_of(40, 1), sampling) == generate(plain, prompt_of(40, 1), sampling)
    assert ahead.stats().num_accepted_tokens > 0


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


SPOILED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda t: without(t, "norm.weight"), "tensor norm.weight is missing"),
    "extra": (lambda t: t | {"odd.weight": torch.ones(1)}, "1 extra tensors: odd.weight"),
    "shape": (lambda t: t | {"fc.weight": torch.ones(2, 2)}, r"tensor fc.weight has shape \[2, 2\], the model needs"),
    "tokens": (lambda t: t | {"d2t": t["d2t"] + 90}, "tensor d2t names tokens that the model has not"),
    "layers": (lambda t: t | {"layers.1.mlp.up_proj.weight": torch.ones(1)}, "heads of one layer are supported"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_wrong_tensors_are_refused_by_name(
    llama: Path, made: Callable[[str], tuple[Path, Any]], spoil: Any, message: str, tmp_path: Path
) -> None:
    folder = made("eagle3")[0]
    save_file(spoil(load_file(folder / "model.safetensors")), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^speculative_model: .*{message}"):
        with_heads(llama, tmp_path, "eagle3")


def test_wrong_files_are_refused_by_name(llama: Path, made: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder = made("eagle3")[0]
    with pytest.raises(ValueError, match=r"speculative.method: 'medusa' is not one of none, ngram, eagle3"):
        with_heads(llama, folder, "medusa")
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors")
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for field, value in (("eagle_aux_hidden_state_layer_ids", [0, 1, 3]), ("eagle_config", {"any": 1})):
        (tmp_path / "config.json").write_text(json.dumps(said | {field: value}), encoding="utf-8")
        with pytest.raises(ValueError, match=field):
            with_heads(llama, tmp_path, "eagle3")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"speculative_model: .*medusa_lm_head.pt: "):
        with_heads(llama, tmp_path, "medusa")
