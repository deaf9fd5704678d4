"""A step waits for its device once, at its end. Over one that counts; and its attention makes no other logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine import Engine, Request, SamplingParams
from tandem.engine.forward.attention import PagedAttention, TorchAttention
from tandem.engine.forward.decode_graphs import DecodeGraphs, padded
from tandem.engine.forward.flashinfer import FlashInfer
from tandem.engine.forward.forward import TorchForward
from tandem.engine.models import Decoder
from tandem.engine.runner import Runner
from tandem.engine.sampling.sampler import choose
from tandem.engine.weights.loader import load_weights
from tests.engine import fake_flashinfer
from tests.engine.fake_device import DeviceTensor, HostDevice
from tests.engine.tiny import VOCAB, greedy, make_engine, prompt_of, run, sampled

KINDS = [
    greedy(9), SamplingParams(8, temperature=0.8, seed=1), SamplingParams(9, temperature=0.9, top_k=5, seed=2),
    SamplingParams(7, temperature=0.7, top_p=0.8, min_p=0.02, seed=3),
]  # fmt: skip
PROMPTS = (3, 12, 21, 30)  # in blocks of 4 and chunks of 16
Attention = Callable[[Tensor, int], PagedAttention]


def by_torch(kv: Tensor, num_heads: int) -> PagedAttention:
    return TorchAttention(kv)


def by_flashinfer(kv: Tensor, num_heads: int) -> PagedAttention:
    return FlashInfer(fake_flashinfer, kv, num_heads)


class NoGradRunner(Runner):
    execute = torch.no_grad()(Runner.execute.__wrapped__)  # type: ignore[attr-defined] # inference_mode knows no peer


def engine_by(
    llama: Path, attention: Attention, *, graphs: bool, place: Callable[[Tensor], Tensor],
    captured: Callable[[], None] = lambda: None,
) -> Engine:  # fmt: skip
    def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        captured()
        return step

    engine, config = make_engine(llama), make_engine(llama).model_config
    cache = [place(kv) for kv in engine.kv_cache]
    model = Decoder(config, torch.float32, str(cache[0].device))
    load_weights(model, llama)
    attend = attention(cache[0], config.num_heads)
    plain = TorchForward(model, cache, attend)
    if graphs:
        with torch.no_grad():
            graph = DecodeGraphs(plain, model, padded(cache), attend, capture, attend.shapes(8, 16, len(cache[0])))
        engine._runner = NoGradRunner(graph, cache, choose)
    else:
        engine._runner = NoGradRunner(plain, cache, choose)
    return engine


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("attention", [by_torch, by_flashinfer])
def test_a_step_waits_once(llama: Path, attention: Attention, graphs: bool) -> None:
    """Over prompts in chunks beside decodes, and decodes alone; the tokens are those of the CPU."""
    requests = [Request(str(n), prompt_of(PROMPTS[n], n), kind) for n, kind in enumerate(KINDS)]
    plain, found = make_engine(llama), dict[str, list[int]]()
    for request in requests:
        plain.add(request)
    expected = {name: [token.token_id for token in sampled(outputs)] for name, outputs in run(plain).items()}
    with HostDevice() as device:
        engine = engine_by(llama, attention, graphs=graphs, place=DeviceTensor, captured=device.waits.clear)
        for request in requests:
            engine.add(request)
        while engine.has_work():
            device.waits.clear()
            outputs = engine.step()
            for output in outputs:
                found.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
            assert len(device.waits) == 1, device.waits
    assert found == expected


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_a_whole_models_logits_by_flashinfer_are_torchs(llama: Path, graphs: bool) -> None:
    found = []
    for engine in make_engine(llama), engine_by(llama, by_flashinfer, graphs=graphs, place=lambda kv: kv):
        for length in PROMPTS:
            engine.add(Request(str(length), prompt_of(length, length), greedy(9, logprobs=VOCAB)))
        tops = [token.top for outputs in run(engine).values() for token in sampled(outputs)]
        found.append(torch.tensor([[dict(top)[token_id] for token_id in range(VOCAB)] for top in tops]))
    assert found[0].shape == (len(PROMPTS) * 9, VOCAB)
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)
