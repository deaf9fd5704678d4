"""The engine on a GPU makes the CPU's tokens, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.transfer.copy.copier import load_copier
from tandem.transfer.copy.device_sum import DeviceSum
from tests.e2e.test_exact import prompt_of


def engine(demo_model: Path, device: str) -> Engine:
    return Engine(
        EngineConfig(model_path=demo_model, model_name="demo", dtype="float32", num_blocks=256, device=device)
    )


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_equal_the_cpus(demo_model: Path, temperature: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    requests = [
        Request(str(n), prompt_of(n, seed=n), SamplingParams(max_tokens=40, temperature=temperature, seed=n))
        for n in (1, 15, 16, 17, 48, 600)
    ]
    assert tokens(engine(demo_model, "cuda"), requests) == tokens(engine(demo_model, "cpu"), requests)


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
