"""Objects of KEDA, the Prometheus operator and the Gateway API are what their own schemas say.

The schemas come from npm (`make` sets them up where npm is); those of the inference extension are in no package, so its
pool is held to what its documentation says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import Object, name_of, of_kind, rendered

SCHEMAS = Path(sys.prefix) / "schemas"
GROUPS = ("keda.sh", "monitoring.coreos.com", "gateway.networking.k8s.io")


def problems(objects: list[Object]) -> list[Any]:
    if not (SCHEMAS / "node_modules").is_dir():
        pytest.skip("no schemas of operators: npm was not there when `make` set up")
    script = Path(__file__).with_name("validate.mjs")
    done = subprocess.run(
        ["node", script, SCHEMAS],
        input=json.dumps(objects),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def test_operators_objects_have_the_shape_that_they_know(value_set: str) -> None:
    objects = [o for o in rendered(value_set) if o["apiVersion"].partition("/")[0] in GROUPS]
    if objects:
        assert dict(zip(map(name_of, objects), problems(objects), strict=True)) == {name_of(o): None for o in objects}


def test_the_schemas_see_what_is_wrong() -> None:
    [good] = of_kind(rendered("gpu-4p8d"), "ScaledObject")
    bad = good | {"spec": good["spec"] | {"scaleTargetRef": {"name": 3}}}
    assert problems([good, bad])[0] is None
    assert "scaleTargetRef/name must be string" in problems([good, bad])[1]


def test_an_inference_pool_is_over_gateways() -> None:
    [pool] = of_kind(rendered("gpu-4p8d"), "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert spec.keys() == {"selector", "targetPorts", "appProtocol", "endpointPickerRef"}
    assert spec["selector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert spec["targetPorts"] == [{"number": 8000}]
    assert spec["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}}
