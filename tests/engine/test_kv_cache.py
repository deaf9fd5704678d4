"""KV in int8: half the bytes, near the numbers, and a block's bytes follow from its tokens, however they came there."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tandem.engine import Engine, KVLayout, Request, SamplingParams
from tandem.engine.kv.kv_cache import opened, row_size, write_kv
from tests.engine.tiny import can_compile, greedy, make_engine, prompt_of, tokens


def test_rows_are_near_what_they_were_and_know_nothing_of_each_other() -> None:
    chance = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 12, 3, 32, generator=chance)
    v[3], v[4], v[5] = 0.0, 1e-30, 1e30
    k[6, 1, 7] = 1000.0
    caches = [torch.full((5, 2, 3, 4, row_size(torch.int8, 32)), -1, dtype=torch.int8) for _ in range(2)]
    slots = torch.tensor([19, 0, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2])
    held = write_kv(caches[0], slots, k, v)
    for i in reversed(range(12)):
        write_kv(caches[1], slots[i : i + 1], k[i : i + 1], v[i : i + 1])
    assert torch.equal(*caches)
    for numbers, found, which in ((k, held[0], 0), (v, held[1], 1)):
        least = numbers.abs().amax(dim=-1, keepdim=True).clamp(min=1e-20)
        assert ((found - numbers).abs() <= least * (0.51 / 127 + 2**-8)).all()
        lying = opened(caches[0][:, which].transpose(1, 2).flatten(0, 1), torch.float32)[slots]
        assert torch.equal(lying, found)


def test_the_layout_says_so_and_halves_the_bytes(llama: Path) -> None:
    plain, int8 = (make_engine(llama, kv_cache_dtype=kv).layout for kv in ("auto", "int8"))
    assert plain.hash != int8.hash
    assert int8.revision == f"{plain.revision}+kv-int8"  # blocks have other names
    wide = [KVLayout("m", "r", "bfloat16", 1, 2, 128, 16, kv_cache_dtype=kv).block_bytes for kv in ("auto", "int8")]
    assert wide[1] / wide[0] == (128 + 2) / 256
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int4' is not one of auto, int8"):
        make_engine(llama, kv_cache_dtype="int4")


@pytest.mark.parametrize(("block_size", "fits"), [(1, False), (2, True), (3, False), (4, True)])
def test_blocks_that_a_device_could_not_copy_are_refused(block_size: int, fits: bool) -> None:
    """The draft has one KV head of 64 numbers: 2 x (64 + 2) bytes a token."""
    one_head = Path(__file__).parents[2] / "models" / "demo" / "draft"
    refusal = f"block_size: {block_size} tokens make blocks of {132 * block_size} bytes .* a multiple of 2 is needed"
    with nullcontext() if fits else pytest.raises(ValueError, match=refusal):
        make_engine(one_head, kv_cache_dtype="int8", block_size=block_size)


@pytest.mark.skipif(not can_compile(), reason="no CPU with AVX512-BF16, or no C compiler")
def test_bytes_follow_from_tokens_alone(tmp_path: Path) -> None:
    """With the compiled kernels, bit for bit: read whole, in chunks, written one by one, or beside others."""
    from tests.engine.test_kernels import MODELS  # its models' sizes are those that the kernels know

    torch.manual_seed(3)
    MODELS["qwen3"]().to(torch.bfloat16).save_pretrained(tmp_path)
    prompt, answer = prompt_of(33, 1), SamplingParams(14, temperature=1.0, seed=5)

    def engine(**config: object) -> Engine:
        return make_engine(tmp_path, dtype="bfloat16", kv_cache_dtype="int8", **config)

    def answered(engine: Engine, request: Request) -> tuple[list[int], list[torch.Tensor]]:
        for seed in (8, 9):
            engine.add(Request(f"beside {seed}", prompt_of(5 * seed, seed), greedy(9)))
        engine.reserve(Request("holds", [2], greedy(1)))  # other blocks than in the other engines
        engine.add(request)
        table, said = list[int](), list[int]()
        while seq := engine._live.get("r"):
            table = max(table, list(seq.block_table), key=len)
            said += tokens(output for output in engine.step() if output.request_id == "r")
        return said, [layer[table[:8]] for layer in engine.kv_cache]

    whole = answered(engine(max_num_batched_tokens=128), Request("r", prompt, answer))
    for chunk, written in ((7, 0), (16, 5), (128, 9)):
        going_on = Request("r", prompt + whole[0][:written], answer, num_prior_tokens=written)
        found = answered(engine(max_num_batched_tokens=chunk), going_on)
        assert found[0] == whole[0][written:]
        assert all(map(torch.equal, found[1], whole[1]))
