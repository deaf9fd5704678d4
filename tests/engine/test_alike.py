"""In float32 on a CPU a token's numbers are the same bit for bit, whatever its engine computes beside it, and however
what comes before it came there: sampled tokens are then the same, too, also where two are as good as equally likely."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.engine.models import linear
from tests.engine.tiny import greedy, sampled

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
BLOCK_SIZE, PROMPT, ANSWER = 16, 211, 6
SAID = list[tuple[int, float]]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(2, 4000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def make_engine(chunk: int) -> Engine:
    return Engine(
        EngineConfig(
            model_path=DEMO, model_name="demo", dtype="float32", num_blocks=256, block_size=BLOCK_SIZE,
            max_num_batched_tokens=chunk, max_num_seqs=16,
        )
    )  # fmt: skip


def answered(engine: Engine, request: Request) -> tuple[SAID, list[torch.Tensor]]:
    """The answer with log-probabilities, and the KV of its tokens in each layer."""
    engine.add(request)
    said, table, length = SAID(), list[int](), 0
    while seq := engine._live.get(request.request_id):
        table, length = max(table, list(seq.block_table), key=len), max(length, seq.num_computed_tokens)
        outputs = [output for output in engine.step() if output.request_id == request.request_id]
        said += [(token.token_id, token.logprob) for token in sampled(outputs)]
    in_order = (layer[table].transpose(1, 3).flatten(0, 1)[:length] for layer in engine.kv_cache)
    return said, [kv.clone() for kv in in_order]


@pytest.fixture(params=["float32_kernels", "torch_alone"])
def computing(request: pytest.FixtureRequest) -> None:
    """Computes with the kernels, where this machine can have them, and without."""
    if request.param == "torch_alone":
        request.getfixturevalue(request.param)


@pytest.mark.parametrize("threads", [1, 2, 8], indirect=True)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.usefixtures("threads", "computing")
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are(turned: bool) -> None:
    """Takes weights as linear layers have them, and turned, as adapters do."""
    chance = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=chance) for size in ((40, 768), (256, 768), (256,)))
    weight = weight.t().contiguous().t() if turned else weight
    whole = linear(x, weight, bias)
    for count in range(1, 40):
        assert torch.equal(linear(x[-count:], weight, bias), whole[-count:]), count


@pytest.mark.parametrize("rows", [1, 31, 32, 300])
def test_a_bfloat16_product_is_within_a_rounding_of_float64s(rows: int) -> None:
    """However many rows go a way of their own where a CPU has no instructions for it."""
    chance = torch.Generator().manual_seed(rows)
    shapes = (rows, 96), (40, 96), (40,)
    x, weight, bias = (torch.randn(shape, generator=chance).bfloat16() for shape in shapes)
    for added in (None, bias):
        found = linear(x, weight, added)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-5)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.usefixtures("threads", "computing")
def test_numbers_do_not_depend_on_what_is_computed_beside_them() -> None:
    prompt, sampling = prompt_of(PROMPT, 1), SamplingParams(ANSWER, temperature=0.9, seed=5, logprobs=0)
    said, kv = answered(make_engine(512), Request("r", prompt, sampling))
    assert len(said) == ANSWER

    for chunk, others, written in ((37, 3, 0), (131, 9, 4), (16, 0, 1)):
        engine = make_engine(chunk)
        for i in range(others):
            engine.add(Request(f"beside {i}", prompt_of(3 + 29 * i, 10 + i), greedy(20)))
        for _ in range(others):
            engine.step()
        going_on = Request("r", prompt + [token for token, _ in said[:written]], sampling, num_prior_tokens=written)
        found, found_kv = answered(engine, going_on)
        assert found == said[written:], f"in chunks of {chunk}, beside {others}, {written} tokens written"
        assert all(map(torch.equal, found_kv, kv))
        again, again_kv = answered(engine, Request("again", prompt, sampling))
        assert again == said, "with its prompt cached"
        assert all(map(torch.equal, again_kv, kv))
