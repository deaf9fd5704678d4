"""The engine on a GPU makes the CPU's tokens, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.engine.device import open_device
from tandem.engine.forward.attention import TorchAttention
from tandem.engine.forward.decode_graphs import CudaCapture
from tandem.engine.forward.flashinfer import FlashInfer
from tandem.engine.models import Scope
from tandem.engine.sampling.sampler import chosen
from tandem.transfer.copy.copier import load_copier
from tandem.transfer.copy.device_sum import DeviceSum
from tests.e2e.test_exact import prompt_of
from tests.engine.test_sampler import sequence


def engine(demo_model: Path, device: str, *, graphs: bool = False, num_blocks: int = 256, swap: int = 0) -> Engine:
    return Engine(
        EngineConfig(
            model_path=demo_model, model_name="demo", dtype="float32", num_blocks=num_blocks, device=device,
            cuda_graphs=graphs, swap_memory=swap,
        )
    )  # fmt: skip


def tokens(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    left = set(found)
    while left:
        for output in engine.step():
            found[output.request_id] += [token.token_id for token in output.tokens]
            if output.finished:
                left.discard(output.request_id)
    engine.check_integrity()
    return found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_equal_the_cpus(demo_model: Path, temperature: float, graphs: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    requests = [
        Request(str(n), prompt_of(n, seed=n), SamplingParams(max_tokens=40, temperature=temperature, seed=n))
        for n in (1, 15, 16, 17, 48, 600)
    ]
    assert tokens(engine(demo_model, "cuda", graphs=graphs), requests) == tokens(engine(demo_model, "cpu"), requests)


@pytest.mark.parametrize("swap", [0, 1 << 28])
def test_tokens_of_preempted_sequences_equal_the_cpus(demo_model: Path, swap: int) -> None:
    """Their KV is computed again, or goes to pinned memory and back."""
    torch.backends.cuda.matmul.allow_tf32 = False
    requests = [
        Request(
            str(n), prompt_of(40 + n, seed=n), SamplingParams(max_tokens=120, temperature=0.8, seed=n, ignore_eos=True)
        )
        for n in range(6)
    ]
    small = engine(demo_model, "cuda", num_blocks=24, swap=swap)
    assert tokens(small, requests) == tokens(engine(demo_model, "cpu"), requests)
    assert small.stats().num_preempted > 0


def test_a_share_of_the_device_is_what_an_engine_takes_of_it(demo_model: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    config = EngineConfig(demo_model, "demo", device="cuda", kv_budget_bytes=None, memory_share=0.3, max_num_seqs=64)
    made = Engine(config)
    taken = free - torch.cuda.mem_get_info()[0]
    assert 0.25 * total < taken < 0.32 * total
    assert made.stats().num_blocks > 1000


def test_a_device_that_is_not_there_and_a_cache_that_does_not_fit_are_named(demo_model: Path) -> None:
    with pytest.raises(ValueError, match="device: 'cuda:99', but this machine shows"):
        open_device("cuda:99")
    with pytest.raises(ValueError, match="kv_memory: weights and KV cache do not fit on cuda"):
        Engine(EngineConfig(demo_model, "demo", device="cuda", kv_budget_bytes=1 << 42))


@pytest.mark.parametrize("count", [1, 100, 1 << 17])
def test_the_checksum_is_the_cpus(count: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(count))
    assert int(DeviceSum(torch.device("cuda"))(words.cuda())) == int(DeviceSum(torch.device("cpu"))(words))


def test_rows_go_out_and_in_through_this_machines_memory() -> None:
    import numpy as np

    from tandem.transfer.copy.rows import Rows

    here, there = torch.randn(16, 64, device="cuda"), torch.zeros(16, 64, device="cuda")
    ids, payload, copier = np.array([3, 1, 7]), np.zeros(3 * 64 * 4, np.uint8).data, load_copier()
    found = copier.gather(Rows(here), ids, payload, past_caches=False)
    assert copier.scatter(payload, Rows(there), ids) == found
    assert torch.equal(there[[3, 1, 7]], here[[3, 1, 7]])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flashinfers_attention_is_ours(head_dim: int) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="needs FlashInfer: the extra gpu")
    kv = torch.randn(40, 2, 2, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    counts, lengths = [1, 1, 20, 33], [5, 70, 20, 100]
    tables = [list(range(start, start + 10)) for start in range(0, 40, 10)]
    q = torch.randn(sum(counts), 8, head_dim, device="cuda", dtype=torch.bfloat16)
    # The third one's context is its first chunk, which ours reads from k and v: here, from the cache.
    past = kv[20:30].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :20]
    k, v = (torch.cat([part.new_zeros(2, 2, head_dim), part, part.new_zeros(33, 2, head_dim)]) for part in past)
    made = FlashInfer(flashinfer, kv, 8), TorchAttention(kv)
    theirs, ours = (attention.planned(counts, lengths, tables)(q, k, v, kv, Scope()) for attention in made)
    torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flashinfer_within_graphs_is_ours(head_dim: int) -> None:
    """Several sizes share what they plan in, and are replayed in turns."""
    flashinfer = pytest.importorskip("flashinfer", reason="needs FlashInfer: the extra gpu")
    kv = torch.randn(41, 2, 2, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    attention, capture, dice = FlashInfer(flashinfer, kv, 8), CudaCapture(), random.Random(3)
    graphs = []
    for rows in (256, 24, 1):
        q, attend = torch.zeros(rows, 8, head_dim, device="cuda", dtype=torch.bfloat16), attention.fixed((rows, 10), 40)
        attend.prepare((), ())
        graphs.append((q, attend, capture(lambda attend=attend, q=q: attend(q, kv, Scope()))))
    for q, attend, replay in dice.choices(graphs, k=12):
        lengths = [dice.randrange(2, 160) for _ in range(dice.randrange(1, len(q) + 1))]
        tables = [dice.sample(range(40), -(-length // 16)) for length in lengths]
        q.normal_()
        attend.prepare(lengths, tables)
        theirs = replay()[: len(lengths)]
        asked = q[: len(lengths)]
        ours = TorchAttention(kv).planned([1] * len(lengths), lengths, tables)(asked, asked, asked, kv, Scope())
        torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2)


def test_a_draw_does_not_wait_for_the_device() -> None:
    seqs = [
        sequence(SamplingParams(4, temperature=t, top_k=k, top_p=p)) for t, k, p in ((0, 0, 1), (1, 5, 1), (1, 0, 0.9))
    ]
    logits = torch.randn(3, 900, device="cuda")
    chosen(logits, seqs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen(logits, seqs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp8_weights_say_nearly_what_plain_ones_say(demo_model: Path) -> None:
    """Held in 8 bits, multiplied in 8 bits."""
    prompts = [
        Request(str(n), prompt_of(200, seed=n), SamplingParams(max_tokens=1, temperature=0.0)) for n in range(40)
    ]
    plain, fp8 = (
        Engine(EngineConfig(demo_model, "demo", dtype="bfloat16", num_blocks=256, device="cuda", quantization=method))
        for method in ("none", "fp8")
    )
    assert plain.layout.hash != fp8.layout.hash
    found, expected = tokens(fp8, prompts), tokens(plain, prompts)
    assert sum(found[name] == said for name, said in expected.items()) > 24
