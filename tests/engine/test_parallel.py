"""Ranks share a model's weights: tokens and KV bytes are those of one rank, whatever the numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tandem.checkpoints.gguf import folder_of
from tandem.engine import Engine, Request
from tandem.engine.models import read_model_config
from tandem.engine.parallel import Shard, check_split
from tandem.speculative import Speculative
from tests.engine.gguf_files import make_file
from tests.engine.peft_folders import make_adapter
from tests.engine.quantized_folders import make_checkpoint
from tests.engine.rank_threads import ranked_engine
from tests.engine.test_checkpoint_formats import CASES, OTHER_ORDER
from tests.engine.test_handoff import CopySink, prefill
from tests.engine.tiny import FAMILIES, Families, assert_idle, generate, greedy, prompt_of, run, sampled, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
COUNTS = (1, 2, 4, 8)
SAMPLING = greedy(4, ignore_eos=True)


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


class Engines:
    """Makes engines whose ranks are threads, and ends them."""

    def __init__(self) -> None:
        self._made: list[Engine] = []

    def __call__(self, path: Path, ranks: int, **config: Any) -> Engine:
        engine = ranked_engine(path, ranks, **config)
        self._made.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.ranks.close()


def model_of(kv_heads: int, windowed: bool) -> PreTrainedModel:
    """A model of two layers, of which the second has a window if any has."""
    torch.manual_seed(kv_heads)
    sizes = SIZES | {"num_key_value_heads": kv_heads}
    window: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, **window)) if windowed else LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in name else 0.0))
    return made


@pytest.mark.parametrize("kind", ["plain", "windows", "int8"])
@pytest.mark.parametrize("kv_heads", COUNTS)
def test_any_number_of_ranks_prefills_for_any_other(kv_heads: int, kind: str, engines: Engines, tmp_path: Path) -> None:
    model_of(kv_heads, kind == "windows").save_pretrained(tmp_path)
    config = {"kv_cache_dtype": "int8"} if kind == "int8" else {}
    prompt = prompt_of(24)  # whole blocks
    expected = generate(engines(tmp_path, 1, **config), prompt, SAMPLING)
    made = {ranks: [engines(tmp_path, ranks, enable_prefix_caching=False, **config) for _ in "PD"] for ranks in COUNTS}
    handed = {
        (source, target): handed_over(made[source][0], made[target][1], prompt)
        for source in COUNTS
        for target in COUNTS
    }
    assert {pair for pair, (answer, _) in handed.items() if answer != expected} == set()
    kv = handed[1, 1][1]
    differ = {pair for pair, (_, its) in handed.items() if not all(map(torch.equal, its, kv))}
    assert differ == set()
    for source, target in made.values():
        assert_idle(source)
        assert_idle(target)


def handed_over(source: Engine, target: Engine, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Prefills on one engine and decodes on another one. Returns the answer and, of each layer, the KV that landed."""
    request = Request("r", prompt, SAMPLING)
    assert target.reserve(request) == 0
    copy = CopySink.of(target, "r")
    first = prefill(source, request, copy, 0)
    landed = []
    for layer, kv in enumerate(target.kv_cache):
        windows = target.layout.windows
        blocks = copy.places if windows and layer in windows.layers else copy.landing
        pushed = [blocks[at] for of, start, count in copy.pushed if of == layer for at in range(start, start + count)]
        assert pushed
        landed.append(kv[pushed].clone())
    target.join("r", first.tokens[0])
    return tokens([first, *run(target)["r"]]), landed


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_same_bits_on_several_ranks(
    name: str, ranks: int, family: Families, engines: Engines
) -> None:
    path, sampling = family(name)[1], greedy(6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    answers, caches = list[object](), list[list[torch.Tensor]]()
    for count in (1, ranks):
        engine = engines(path, count)
        for i in range(3):
            engine.add(Request(f"r{i}", prompt_of(17 + i, seed=i), sampling))
        outputs = run(engine)
        reported = {key: next(out.prompt_logprobs for out in outs if out.tokens) for key, outs in outputs.items()}
        answers.append(({key: sampled(outs) for key, outs in outputs.items()}, reported))
        caches.append(engine.kv_cache)
        assert_idle(engine)
    assert answers[0] == answers[1]
    assert all(map(torch.equal, *caches))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization": "int8"}, "llama2"),
        ({"quantization": "int4"}, "qwen2"),
        ({"quantization": "int8"}, "deepseek-v2"),
        ({"dtype": "bfloat16"}, "llama3"),
        ({"kv_cache_dtype": "int8"}, "gemma3"),
        ({"speculative": Speculative("ngram", 3)}, "llama3"),
        ({"num_blocks": 12, "swap_memory": 1 << 20}, "llama3"),
        ({"num_blocks": 12}, "mistral-window"),
    ],
    ids=lambda value: str(value),
)
def test_what_an_engine_can_do_its_ranks_can(
    config: dict[str, Any], name: str, family: Families, engines: Engines
) -> None:
    path, answers = family(name)[1], list[dict[str, list[int]]]()
    for ranks in (1, 2):
        engine = engines(path, ranks, **{"cpu_kernels": False, **config})
        for i in range(4):
            engine.add(Request(f"r{i}", prompt_of(5, seed=i) * 3, greedy(12, ignore_eos=True)))
        answers.append({key: tokens(outs) for key, outs in run(engine).items()})
        assert_idle(engine)
    assert answers[0] == answers[1]


def test_a_draft_model_drafts_for_several_ranks(family: Families, engines: Engines) -> None:
    path, draft = family("llama3")[1], family("qwen2")[1]
    config = {"speculative": Speculative("draft", 3), "speculative_model": draft}
    answers = [generate(engines(path, ranks, **config), prompt_of(20), greedy(10)) for ranks in (1, 2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["llama3", "phi3", "olmo2", "qwen3-moe"])
def test_adapters_add_to_each_ranks_own_outputs(name: str, family: Families, engines: Engines, tmp_path: Path) -> None:
    path = family(name)[1]
    folders = [make_adapter(tmp_path / name, path, seed=seed) for seed, name in enumerate("ab")]
    answers = list[dict[str, list[int]]]()
    for ranks in (1, 2, 4):
        engine = engines(path, ranks, lora_dir=tmp_path, enable_prefix_caching=False)
        assert engine.adapters is not None
        found = dict[str, list[int]]()
        for turn in range(2):  # adapters of the first turn are dropped before the second
            for i, folder in enumerate([*folders, None]):
                ref = None if folder is None else engine.adapters.read(folder.name, folder.name)
                adapter = None if ref is None else engine.adapters.get(ref)
                request = Request(f"{turn}{i}", prompt_of(20), greedy(8, ignore_eos=True), lora=ref, adapter=adapter)
                engine.add(request)
                del adapter, request
            found |= {key: tokens(outs) for key, outs in run(engine).items()}
            for revision in engine.adapters.held():
                engine.adapters.drop(revision)
        answers.append(found)
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(answer) for answer in answers[0].values()}) == 3


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q4_K"), ("llama", "F16"), ("qwen2", "Q8_0")])
def test_a_gguf_file_is_read_by_rows(name: str, kind: str, engines: Engines, tmp_path: Path) -> None:
    make_file(tmp_path / "m.gguf", name, kind)
    path = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    answers = [generate(engines(path, ranks), prompt_of(20), greedy(8, ignore_eos=True)) for ranks in (1, 2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("form", ["gptq 4", "awq", "packed actorder", "int 8"])
def test_quantized_checkpoints_are_split_by_rows(form: str, family: Families, engines: Engines, tmp_path: Path) -> None:
    pack, config, bits, group, symmetric = CASES[form]
    path, _ = make_checkpoint(
        family("qwen3")[1], tmp_path, pack, config, bits=bits, group=group, symmetric=symmetric,
        ordered=form not in OTHER_ORDER,
    )  # fmt: skip
    answers = [generate(engines(path, ranks), prompt_of(20), greedy(8, ignore_eos=True)) for ranks in (1, 2)]
    assert answers[0] == answers[1]


def test_logits_of_many_rows_come_in_parts(family: Families, engines: Engines) -> None:
    path, prompt = family("llama3")[1], prompt_of(100)
    config = {"max_num_batched_tokens": 128, "max_num_seqs": 80, "num_blocks": 400}
    answers = list[dict[str, list[int]]]()
    for ranks in (1, 2):
        engine = engines(path, ranks, **config)
        for i in range(80):
            engine.add(Request(f"r{i}", [*prompt[:4], 2 + i], greedy(3, ignore_eos=True)))
        answers.append({key: tokens(outs) for key, outs in run(engine).items()})
    assert answers[0] == answers[1]


def test_every_head_and_output_is_some_ranks(family: Families) -> None:
    config = read_model_config(family("llama3")[1], None)
    for ranks in (1, 2, 4):
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        for size in (1, 63, 64, 65, 640, 1000):
            assert [i for shard in shards for i in shard.outputs(size)] == list(range(size))
            assert all(shard.outputs(size).start % 64 == 0 or not shard.outputs(size) for shard in shards)
        assert [i for shard in shards for i in shard.heads(config)] == list(range(config.num_heads))
        for shard in shards:
            share = config.num_heads // config.num_kv_heads
            assert {head // share for head in shard.heads(config)} == set(shard.kv_heads(config))


@pytest.mark.parametrize(
    ("name", "ranks", "why"),
    [
        ("llama3", 3, "3 ranks cannot share 4 heads over 2 KV heads: take 1, 2, 4"),
        ("llama3", 8, "8 ranks cannot share 4 heads over 2 KV heads: take 1, 2, 4"),
        ("deepseek-v3", 3, "3 ranks cannot share 4 heads over 1 KV heads: take 1, 2, 4"),
    ],
)
def test_a_number_of_ranks_that_cannot_share_a_model_is_refused(
    name: str, ranks: int, why: str, family: Families
) -> None:
    with pytest.raises(ValueError, match=f"^tensor_parallel: {why}$"):
        check_split(read_model_config(family(name)[1], None), ranks)
