"""A device that cannot be used ends a worker in one line that names the cause and what would help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ByteSize

from tandem.engine import EngineConfig
from tandem.engine.device import memory_checked, open_device
from tandem.worker import WorkerSettings


class TwoDevices:
    """torch.cuda where there are two, or where `problem` is what it says."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem
        self.chosen = -1

    def init(self) -> None:
        if self._problem:
            raise RuntimeError(self._problem)

    def device_count(self) -> int:
        return 2

    def set_device(self, device: int) -> None:
        self.chosen = device

    def mem_get_info(self) -> tuple[int, int]:
        return 3 << 30, 80 << 30


def test_devices_are_chosen_by_name() -> None:
    cuda = TwoDevices()
    assert open_device("cpu", cuda, None) == torch.device("cpu")
    assert open_device("cuda", cuda, "13.0") == torch.device("cuda:0")
    assert open_device("cuda:1", cuda, "13.0") == torch.device("cuda:1")
    assert cuda.chosen == 1


@pytest.mark.parametrize(
    ("name", "built_for", "problem", "text"),
    [
        ("gpu", "13.0", "", "device: 'gpu' is not cpu, cuda or cuda:N"),
        ("cuda:x", "13.0", "", "device: 'cuda:x' is not"),
        ("cuda", None, "", "is without CUDA: install a build with it"),
        ("cuda:2", "13.0", "", "device: 'cuda:2', but this machine shows 2 of them: cuda:0 to cuda:1"),
        ("cuda", "13.0", "Found no NVIDIA driver on your system.\nPlease check", "'cuda': Found no NVIDIA driver"),
        ("cuda", "13.0", "The NVIDIA driver on your system is too old (found version 11040).", "is too old"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, built_for: str | None, problem: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"^device: ") as raised:
        open_device(name, TwoDevices(problem), built_for)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_graphs_need_a_gpu(demo_model: Path) -> None:
    with pytest.raises(ValueError, match=r"cuda_graphs: the device is cpu"):
        EngineConfig(model_path=demo_model, model_name="demo", cuda_graphs=True)


def test_several_ranks_need_weights_and_the_hosts_memory(demo_model: Path) -> None:
    assert WorkerSettings(model_path=demo_model, tensor_parallel=2).engine_config().tensor_parallel == 2
    assert WorkerSettings(model_path=demo_model, device="cuda", engine="null").engine_config().tensor_parallel == 1
    with pytest.raises(ValueError, match=r"tensor_parallel: the null engine has no weights to share"):
        WorkerSettings(model_path=demo_model, tensor_parallel=2, engine="null").engine_config()
    with pytest.raises(ValueError, match=r"tensor_parallel: .* on GPUs not yet"):
        WorkerSettings(model_path=demo_model, tensor_parallel=2, device="cuda").engine_config()
    for number in (0, 9):
        with pytest.raises(ValueError, match=r"tensor_parallel\n.* (greater|less) than or equal to"):
            WorkerSettings(model_path=demo_model, tensor_parallel=number)


def test_a_cache_that_does_not_fit_is_named_with_what_is_free() -> None:
    with pytest.raises(ValueError, match=r"kv_memory: .* on cuda:0, which has 3\.0 GiB of 80\.0 GiB free"):  # noqa: SIM117
        with memory_checked(torch.device("cuda:0"), TwoDevices()):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100.00 GiB.\nmore")


def test_a_worker_that_is_told_nothing_takes_what_suits_its_device(demo_model: Path) -> None:
    on_cpu, on_gpu = (WorkerSettings(model_path=demo_model, device=device) for device in ("cpu", "cuda:1"))
    assert on_cpu.kv_transports == ("shm", "tcp")
    assert on_gpu.kv_transports == ("nccl", "cuda_ipc", "shm", "tcp")
    configs = on_cpu.engine_config(), on_gpu.engine_config()
    assert [(config.kv_budget_bytes, config.memory_share) for config in configs] == [(256 << 20, 0.9), (None, 0.9)]
    assert [config.max_num_batched_tokens for config in configs] == [0, 0]
    told = WorkerSettings(
        model_path=demo_model,
        device="cuda",
        transports=("tcp",),
        kv_memory=ByteSize(1 << 30),
        max_num_batched_tokens=64,
    )
    assert told.kv_transports == ("tcp",)
    assert (told.engine_config().kv_budget_bytes, told.engine_config().max_num_batched_tokens) == (1 << 30, 64)
    shared = WorkerSettings(model_path=demo_model, device="cuda", kv_memory="0.45").engine_config()
    assert (shared.kv_budget_bytes, shared.memory_share) == (None, 0.45)
    assert WorkerSettings(model_path=demo_model, kv_memory="4GiB").engine_config().kv_budget_bytes == 4 << 30
    with pytest.raises(ValueError, match=r"kv_memory: a share is of a GPU's memory"):
        WorkerSettings(model_path=demo_model, kv_memory=0.9).engine_config()


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_worker_ends_with_that_line(demo_model: Path, service: str) -> None:
    command = [sys.executable, "-m", f"services.{service}", "--device=cuda", f"--model-path={demo_model}"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith(f"device: 'cuda', but torch {torch.__version__} is without CUDA: install a build with it")
    )
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_worker_whose_transports_all_need_a_device_ends_with_their_reasons(demo_model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    options = ["--transports=nccl,cuda_ipc", "--engine=null", f"--model-path={demo_model}"]
    command = [sys.executable, "-m", "services.decode", *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "transports: none can be used here: nccl: " in last
    assert "cuda_ipc: no CUDA device" in last
    assert "Traceback" not in done.stderr
