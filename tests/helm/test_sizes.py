"""The value sets for GPUs ask for what their devices hold, by the arithmetic of `tandem doctor --fit`."""

from __future__ import annotations

import pytest
from pydantic import ByteSize, TypeAdapter

from tandem.checkpoints import MemoryNeed, misfit
from tests.helm.chart import SETS, Object, of_kind, rendered

GIB = 2**30
# Bytes of the weights, as their owners publish them: parameters in bfloat16.
WEIGHTS = {"Qwen/Qwen3-8B": 2 * 8_190_735_360, "Qwen/Qwen3-32B": 2 * 32_762_123_264}
# Memory that a device reports, by the label that NVIDIA's operator gives its node; without one, the least of these.
DEVICES = {"NVIDIA-H100-80GB-HBM3": 79 * GIB, "NVIDIA-H200": 139 * GIB, "": 79 * GIB}
BYTES = TypeAdapter(ByteSize)


def workers(value_set: str) -> list[Object]:
    pods = [maker["spec"]["template"]["spec"] for maker in of_kind(rendered(value_set), "Deployment")]
    return [pod for pod in pods if "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]]


@pytest.mark.parametrize("on_gpus", [name for name in SETS if name.startswith("gpu")])
def test_weights_and_kv_fit_a_device(on_gpus: str) -> None:
    assert workers(on_gpus)
    for pod in workers(on_gpus):
        told = {variable["name"]: variable.get("value", "") for variable in pod["containers"][0]["env"]}
        need = MemoryNeed(WEIGHTS[told["TANDEM_MODEL_NAME"]], BYTES.validate_python(told["TANDEM_KV_MEMORY"]))
        device = DEVICES[pod.get("nodeSelector", {}).get("nvidia.com/gpu.product", "")]
        assert not misfit([need], device)
