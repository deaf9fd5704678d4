"""Ranks that compute with the compiled kernels give the bits of one rank: tokens, logprobs, and the KV cache."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tandem.checkpoints.gguf import folder_of
from tandem.engine import Engine, EngineConfig, RankDied, Request
from tandem.engine.kernels import load_library
from tandem.engine.loading import loaded, rank
from tandem.engine.loading.shard_forward import ShardForward
from tandem.engine.models import Decoder, read_model_config
from tandem.engine.parallel import RankExchange, Rooms, Shard, ShardedDecoder, SharedMemory
from tandem.engine.quantization import QuantizedWeight
from tandem.engine.weights import load_weights
from tandem.speculative import Speculative
from tests.engine.gguf_files import make_file
from tests.engine.head_folders import make_heads
from tests.engine.peft_folders import make_adapter
from tests.engine.quantized_folders import make_checkpoint
from tests.engine.rank_threads import RankThread
from tests.engine.test_checkpoint_formats import CASES
from tests.engine.test_handoff import CopySink, prefill
from tests.engine.test_heads import SAMPLINGS
from tests.engine.test_ranks import children
from tests.engine.tiny import LINEAR_ROPE, assert_idle, can_amx, can_compile, greedy, prompt_of, run, sampled, tokens

pytestmark = pytest.mark.skipif(not can_compile(), reason="no CPU with AVX512-BF16, or no compiler")

# Shares of two ranks and of four have several sizes: units of 64 are 5, 4 and 6, of which the last has 32 outputs.
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 352, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=8),
    "qwen2-tied": lambda: Qwen2Config(**SIZES | {"num_key_value_heads": 8}, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "phi3": lambda: Phi3Config(**SIZES),
    "granite": lambda: GraniteConfig(
        **SIZES, embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=0.5
    ),
    "glm4": lambda: Glm4Config(**SIZES | {"head_dim": 64}),
    "gemma2": lambda: Gemma2Config(
        **SIZES, query_pre_attn_scalar=24, sliding_window=40, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        query_pre_attn_scalar=24,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}},
    ),
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8,
    "enable_prefix_caching": False,
}  # fmt: skip
SAMPLING = greedy(6, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelRanks]:
    monkeypatch.setattr(loaded, "ShardForward", CountedForward)
    made = KernelRanks()
    yield made
    made.close()


class CountedForward(ShardForward):
    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        CountedForward.made += 1


class KernelRanks:
    """Makes engines of bfloat16 whose ranks are threads, and ends them. All compute with the kernels."""

    def __init__(self) -> None:
        self._made: list[Engine] = []

    def __call__(self, path: Path, ranks: int, **config: Any) -> Engine:
        before = CountedForward.made
        with capture_logs() as logs:
            its = EngineConfig(path, "tiny", **{**SETTINGS, **config}, tensor_parallel=ranks)
            engine = Engine(its, now=lambda: 0.0, start_rank=RankThread)
        self._made.append(engine)
        assert CountedForward.made - before == (ranks if ranks > 1 else 0)
        assert not [entry for entry in logs if entry["event"].startswith("CPU kernels are off")]
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.ranks.close()


def saved(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.1 + ("norm" in name))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def computed(engine: Engine, prompts: list[list[int]]) -> tuple[object, list[torch.Tensor]]:
    """Returns what the engine says of the prompts, and its KV."""
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SAMPLING))
    outputs = run(engine)
    assert_idle(engine)
    reported = {key: next(out.prompt_logprobs for out in outs if out.tokens) for key, outs in outputs.items()}
    return ({key: sampled(outs) for key, outs in outputs.items()}, reported), engine.kv_cache


PROMPTS = [prompt_of(length, length) for length in (3, 17, 20, 33)]


def check_alike(engines: KernelRanks, path: Path, counts: tuple[int, ...] = (2, 4), **config: Any) -> None:
    expected, kv = computed(engines(path, 1, **config), PROMPTS)
    for ranks in counts:
        found, its = computed(engines(path, ranks, **config), PROMPTS)
        assert found == expected
        assert all(map(torch.equal, its, kv))


@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_the_bits_of_one(name: str, engines: KernelRanks, tmp_path: Path) -> None:
    check_alike(engines, saved(MODELS[name](), tmp_path))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization": "int8"}, "qwen2-tied"),
        ({"quantization": "int4"}, "llama-biased"),
        ({"kv_cache_dtype": "int8"}, "gemma3"),
        ({"kv_cache_dtype": "int8", "block_size": 16}, "qwen2-tied"),
        ({"num_blocks": 24, "swap_memory": 1 << 20}, "qwen3"),
        ({"max_num_batched_tokens": 128, "block_size": 16}, "qwen3"),
    ],
    ids=str,
)
def test_what_one_rank_can_do_they_can(config: dict[str, Any], name: str, engines: KernelRanks, tmp_path: Path) -> None:
    check_alike(engines, saved(MODELS[name](), tmp_path), **config)


@pytest.mark.parametrize(
    ("amx", "flags"),
    [
        pytest.param(True, (), marks=pytest.mark.skipif(not can_amx(), reason="no AMX")),
        (False, ()),
        pytest.param(False, ("-DSTALLS=8",), marks=pytest.mark.long),  # a thread loses its core now and then
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_ranks_of_several_threads_meet(
    name: str,
    amx: bool,
    flags: tuple[str, ...],
    engines: KernelRanks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    before, library = torch.get_num_threads(), load_library(amx=amx, flags=flags)
    for module in (loaded, rank):
        monkeypatch.setattr(module, "load_library", lambda: library)
    monkeypatch.setattr(loaded, "LEAST_WORK", 1)
    try:
        check_alike(engines, saved(MODELS[name](), tmp_path), (2,), num_threads=4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["packed actorder", "gptq 4"])
def test_quantized_checkpoints_are_computed_alike(form: str, engines: KernelRanks, tmp_path: Path) -> None:
    """Inputs in another order are put into it by each rank, in memory of its own."""
    pack, config, bits, group, symmetric = CASES[form]
    source = saved(MODELS["llama-biased" if form == "gptq 4" else "qwen3"](), tmp_path / "source")
    path, _ = make_checkpoint(
        source, tmp_path, pack, config, bits=bits, group=group, symmetric=symmetric, ordered=form == "gptq 4"
    )
    check_alike(engines, path)


def test_adapters_are_cut_to_a_ranks_columns(engines: KernelRanks, tmp_path: Path) -> None:
    path, answers = saved(MODELS["qwen3"](), tmp_path / "model"), list[dict[str, object]]()
    names = [make_adapter(tmp_path / "adapters" / name, path, seed=seed).name for seed, name in enumerate("ab")]
    for ranks in (1, 2, 4):
        engine = engines(path, ranks, lora_dir=tmp_path / "adapters")
        assert engine.adapters is not None
        for name in names:
            ref = engine.adapters.read(name, name)
            engine.add(Request(name, prompt_of(20), SAMPLING, lora=ref, adapter=engine.adapters.get(ref)))
        engine.add(Request("none", prompt_of(20), SAMPLING))
        answers.append({key: sampled(outs) for key, outs in run(engine).items()})
    assert answers[0] == answers[1] == answers[2]
    assert len({str(answer) for answer in answers[0].values()}) == 3


def test_heads_read_what_goes_into_layers(engines: KernelRanks, tmp_path: Path) -> None:
    path, found = saved(LlamaConfig(**SIZES), tmp_path / "model"), list[tuple[object, ...]]()
    (tmp_path / "heads").mkdir()
    make_heads("eagle3", tmp_path / "heads", AutoModelForCausalLM.from_pretrained(path))
    for ranks in (1, 2, 4):
        engine = engines(path, ranks, speculative=Speculative("eagle3", 4), speculative_model=tmp_path / "heads")
        for number, sampling in enumerate(SAMPLINGS.values()):
            engine.add(Request(str(number), prompt_of(40, 1), sampling))
        outputs, stats = run(engine), engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens
        found.append(({key: tokens(outs) for key, outs in outputs.items()}, stats.num_accepted_tokens))
    assert found[0] == found[1] == found[2]


def test_a_layer_is_pushed_once_all_ranks_have_written_it(engines: KernelRanks, tmp_path: Path) -> None:
    path, prompt = saved(MODELS["qwen3"](), tmp_path), prompt_of(24)
    landed = list[list[torch.Tensor]]()
    for ranks in (1, 2, 4):
        source, target = engines(path, ranks), engines(path, 1)
        request = Request("r", prompt, greedy(4, ignore_eos=True))
        assert target.reserve(request) == 0
        copy = CopySink.of(target, "r")
        target.join("r", prefill(source, request, copy, 0).tokens[0])
        landed.append([kv[copy.landing].clone() for kv in target.kv_cache])
        run(target)
    assert all(torch.equal(kv, first) for its in landed for kv, first in zip(its, landed[0], strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [(signal.SIGKILL, "rank 1 ended with status -9"), (signal.SIGSTOP, "rank 1 stood still for 1.[5-9] s")],
)
def test_a_lost_rank_ends_a_pass_that_waits_for_it(how: signal.Signals, message: str, tmp_path: Path) -> None:
    path = saved(MODELS["qwen3"](), tmp_path)
    engine = Engine(EngineConfig(path, "tiny", **SETTINGS, tensor_parallel=2))
    engine.add(Request("r", PROMPTS[1], greedy(60, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    (child,) = children()
    os.kill(child.pid, how)
    with pytest.raises(RankDied, match=f"^{message}$"):
        run(engine)
    with pytest.raises(RankDied, match=message):
        engine.step()
    child.wait(30)


def test_quantized_tensors_of_a_gguf_file_are_cut_by_rows(tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", "qwen2", "Q8_0")
    path = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    config = read_model_config(path, None)
    whole = Decoder(config, torch.bfloat16)
    load_weights(whole, path, keep_codes=True)
    rooms = Rooms.of(config, 2, 16, 8)
    exchange = RankExchange(SharedMemory.new(rooms.size), rooms, 1, 2, lambda: None)
    shard = ShardedDecoder(config, torch.bfloat16, Shard(1, 2), exchange)
    load_weights(shard, path, keep_codes=True, rows=shard.rows)
    found, expected = shard.layers[1].mlp.down.weight, whole.layers[1].mlp.down.weight
    assert isinstance(found, QuantizedWeight)
    assert isinstance(expected, QuantizedWeight)
    assert torch.equal(found.dense(torch.float32), expected.dense(torch.float32)[128:])
    assert isinstance(shard.lm_head, QuantizedWeight)
    assert isinstance(whole.lm_head, QuantizedWeight)
    assert torch.equal(shard.lm_head.codes, whole.lm_head.codes[128:])


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (Qwen3MoeConfig(**SIZES, num_experts=9), 2, "they do not share experts among ranks"),
        (Qwen3Config(**SIZES | {"hidden_size": 128}), 4, "shares of the model's sizes are no multiples of 32"),
        (Qwen3Config(**SIZES | {"vocab_size": 330}), 2, "shares of the model's sizes are no multiples of 32"),
        (Qwen3Config(**SIZES | {"head_dim": 24}), 2, "the model's sizes are no multiples of 32"),
        (Qwen3Config(**SIZES), 2, ""),
    ],
    ids=["experts", "too narrow", "vocabulary", "head", "fits"],
)
def test_what_ranks_cannot_compute_is_said(config: PretrainedConfig, ranks: int, reason: str, tmp_path: Path) -> None:
    config.architectures = ["ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert ShardForward.misfit_among(read_model_config(tmp_path, None), ranks) == reason
