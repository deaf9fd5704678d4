"""I2 over the transports of GPUs: their real code, over fakes of NCCL and CUDA that move bytes between processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tandem.engine import Engine, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import RunningCluster, running_cluster
from tests.e2e.test_exact import BLOCK, generate, oracle, prompt_of

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["nccl", "cuda_ipc"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    options = "--dtype=float32", f"--transports={request.param},tcp", "--disaggregation=require"
    env = {"PYTHONPATH": f"{ROOT / 'tests/e2e/fake_gpus'}:{ROOT}"}
    with running_cluster(tmp_path_factory.mktemp(request.param), *options, env=env) as cluster:
        yield cluster


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("length", [1, BLOCK, 3 * BLOCK + 1, 600])
def test_tokens_equal_the_one_process_engines(
    cluster: RunningCluster, one_process_engine: Engine, length: int, temperature: float
) -> None:
    prompt = prompt_of(length, seed=length)
    expected, _ = oracle(one_process_engine, prompt, SamplingParams(max_tokens=30, temperature=temperature, seed=7))
    sampling = llm_pb2.SamplingParams(max_tokens=30, temperature=temperature, seed=7, ignore_eos=True)
    with grpc.insecure_channel(cluster.grpc) as channel:
        tokens, last = generate(llm_pb2_grpc.LLMServiceStub(channel), prompt, sampling)
    assert tokens == expected
    assert last.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
    assert last.path.transport in str(cluster.logs)
    assert last.path.transport in ("nccl", "cuda_ipc")
