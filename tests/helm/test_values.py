"""The chart's values: strict, explained, and each of them read by a template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import yaml

from deploy.generate import SERVICES, SET_BY_CHART, commented, documents
from tests.helm.chart import (
    CHART,
    SETS,
    Values,
    loaded,
    name_of,
    notes,
    of_kind,
    render,
    rendered,
    texts,
    values_of,
)

DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
Path = tuple[str | int, ...]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "'gatway' not allowed"),
        ({"pools": [{"name": "a", "role": "prefil", "model": "demo"}]}, "'/pools/0/role': value must be one of"),
        ({"pools": [{"name": "a", "role": "decode", "model": "demo", "replica": 2}]}, "'replica' not allowed"),
        ({"pools": [{"name": "Big.Pool", "role": "decode", "model": "demo"}]}, "'/pools/0/name': 'Big.Pool' does not"),
        ({"pools": [{"name": "kvstore", "role": "decode", "model": "demo"}]}, 'pools: the name "kvstore" is taken'),
        ({"pools": [{"name": "a", "role": "decode", "model": "other"}]}, 'model "other" is the id of none of'),
        ({"workers": {"settings": {"kv_memorry": "4GiB"}}}, "'kv_memorry' not allowed"),
        ({"workers": {"settings": {"worker_id": "me"}}}, "'worker_id' not allowed"),
        ({"gateway": {"settings": {"disaggregation": "never"}}}, "'/gateway/settings/disaggregation': value must be"),
        ({"gateway": {"env": [{"name": "TANDEM_HOST", "value": "x"}]}}, "'/gateway/env/0/name'"),
        ({"models": [{"id": "m", "name": "m", "weights": {"kind": "claim"}}]}, "missing property 'claim'"),
        ({"models": [{"id": "m", "name": "m", "weights": {"kind": "download", "url": "hf://m"}}]}, "'files'"),
        ({"gateway": {"autoscaling": {"kind": "hpa", "min": 9}}}, "autoscaling.min must not be above"),
        ({"ingress": {"enabled": True}}, "models: demo: an Ingress or a route needs hostnames"),
        ({"gatewayApi": {"http": True}}, "gatewayApi.parents: name the Gateway"),
        ({"redis": {"url": "http://redis"}}, "'/redis/url'"),
        ({"workers": {"autoscaling": {"fallback": {"replicas": 2}}}}, "'failureThreshold' required"),
        ({"telemetry": {"endpoint": "collector:4317"}}, "'/telemetry/endpoint'"),
        ({"ipFamily": "both"}, "'/ipFamily': value must be one of 'IPv4', 'IPv6'"),
    ],
)
def test_bad_values_are_refused_with_what_is_wrong(values: Values, words: str) -> None:
    from helm_python import HelmError

    with pytest.raises(HelmError) as refused:
        render(values)
    assert words in str(refused.value)


def test_long_names_that_begin_alike_stay_apart() -> None:
    same = "inference-platform-team-llama"
    one, other = ({name_of(found) for found in render({}, f"{same}-{size}")} for size in ("8b", "70b"))
    assert len(one) == len(other)
    assert not one & other
    assert all(len(name.partition("/")[2]) <= 52 for name in one | other)


@pytest.mark.parametrize(
    ("values", "prefix"), [({"nameOverride": "llm"}, "rel-llm-"), ({"fullnameOverride": "llm"}, "llm-")]
)
def test_names_are_overridden(values: Values, prefix: str) -> None:
    assert all(found["metadata"]["name"].startswith(prefix) for found in render(values))


def test_the_chart_lints(value_set: str) -> None:
    from helm_python import chart

    report = chart.lint(CHART, values_of(value_set), strict=True)
    assert [m for m in report["messages"] if m["severity"] > 1] == []
    assert report["errors"] == []


def test_the_chart_brings_no_crds_and_is_small_enough_for_a_release() -> None:
    assert loaded().crds == []
    size = sum(len(text["data"]) for text in loaded().templates + loaded().files)
    assert size < 700_000  # a release is one Secret: at most 1 MiB, the rendered objects included


# --- every value is explained ---


def leaves(values: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        yield from leaves(values[0], (*path, 0))
    else:
        yield path


def test_every_value_has_a_comment() -> None:
    comments = {path: text for path, text in commented((CHART / "values.yaml").read_text(encoding="utf-8")) if text}
    groups = {path for path in comments if len(path) == 1}
    for leaf in leaves(DEFAULTS):
        path = tuple("[]" if part == 0 else str(part) for part in leaf)
        known = [path[:n] for n in range(1, len(path) + 1) if path[:n] in comments]
        assert [p for p in known if p not in groups or p == path], ".".join(path)


def test_values_and_schema_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def keys(node: Any, path: Path = ()) -> Iterator[Path]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if node.get("type") == "array" and "properties" in node.get("items", {}):
            yield from keys(node["items"], (*path, 0))
        elif "properties" in node and node.get("additionalProperties") is False:
            for key, part in node["properties"].items():
                yield from keys(part, (*path, key))
        else:
            yield path

    def structure(path: Path) -> bool:
        """As in Kubernetes, or a service's own: explained there."""
        return bool({"resources", "settings", "env", "rollout", "behavior", "fallback", "ref"} & set(path)) or path[
            0
        ] in ("pools", "global")

    described = {path for path in keys(schema) if not structure(path)}
    given = {path for path in leaves(DEFAULTS) if not structure(path)}
    ends = ("gatewayFrom", "metricsFrom")  # lists of objects, empty here
    assert {p for p in described if not set(ends) & set(p)} == {p for p in given if not set(ends) & set(p)}


def test_generated_parts_are_up_to_date() -> None:
    for path, text in documents().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run `make docs`"


# --- every value is read ---

# A change of these alone is refused, as shown above.
NAMED_BY_OTHERS = {("models", 0, "id"), ("pools", 0, "model")}
WORDS: list[Any] = [
    "changed", "9Gi", "99mb", "https://changed.example", "IPv6", "redis://changed", "29%", "keda", "cuda", "none",
    "Always", "NodePort", "claim", "baked", "decode", "/changed", "29s", "s3://changed", "rdma/other", "http/protobuf",
]  # fmt: skip
LISTS: list[Any] = [
    ["changed"], [{"key": "changed"}], [{"podSelector": {}}], [{"name": "CHANGED", "value": "x"}], [{"name": "edge"}],
]  # fmt: skip


DIGESTS = {"gateway": f"sha256:{'1' * 64}"}


def changes(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value / 2]
    if isinstance(value, dict):
        return [
            {"changed": "changed"},
            {"log_level": "debug"},
            {"NCCL_DEBUG": "INFO"},
            {"config.json": "1" * 64},
            DIGESTS,
            {"failureThreshold": 3, "replicas": 2},
            {"name": "prometheus"},
        ]
    return LISTS if isinstance(value, list) else WORDS


def at(values: Any, path: Path) -> Any:
    for part in path:
        values = values[part]
    return values


def put(values: Values, path: Path, value: Any) -> Values:
    values = deepcopy(values)
    *parents, last = path
    at(values, tuple(parents))[last] = value
    return values


def contexts() -> dict[str, Values]:
    """Values under which every value matters, in one or another."""
    whole = deepcopy(DEFAULTS)
    whole["redis"]["bundled"]["password"] = whole["store"]["bundled"]["password"] = "fixed"
    whole["models"][0]["hostnames"] = ["example.com"]
    whole["monitoring"]["enabled"] = whole["ingress"]["enabled"] = whole["inferencePool"]["enabled"] = True
    whole["monitoring"]["apiKey"]["secret"] = "scraper"
    whole["ingress"] |= {"grpc": True, "tlsSecret": "tls"}
    whole["gatewayApi"] |= {"parents": [{"name": "edge"}], "http": True, "grpc": True}
    whole["inferencePool"]["endpointPicker"]["name"] = "picker"
    whole["workers"]["pairing"]["topologyKey"] = "rack"
    whole["workers"]["rdma"]["resource"] = "rdma/hca"
    whole["caBundle"]["configMap"], whole["telemetry"]["endpoint"] = "ca", "http://collector:4317"
    keda, hpa = deepcopy(whole), deepcopy(whole)
    keda["workers"]["autoscaling"]["kind"] = hpa["workers"]["autoscaling"]["kind"] = "keda"
    keda["gateway"]["autoscaling"]["kind"], hpa["gateway"]["autoscaling"]["kind"] = "hpa", "keda"
    found = {"whole": whole, "keda": keda, "hpa": hpa}
    for kind, more in {
        "claim": {"claim": "c"}, "hostPath": {"hostPath": "/h"}, "image": {"image": "i"},
        "download": {"url": "s3://b", "files": {"config.json": "0" * 64}},
    }.items():  # fmt: skip
        found[kind] = deepcopy(whole)
        found[kind]["models"][0]["weights"] |= {"kind": kind, **more}
    return found


CONTEXTS = contexts()


@cache
def unchanged(context: str) -> dict[str, str]:
    return texts(CONTEXTS[context])


def matters(path: Path) -> bool:
    """True if some change of this value changes what is rendered."""
    from helm_python import HelmError

    # What is special comes last, and is mostly about models.
    for context, values in reversed(CONTEXTS.items()) if path[0] == "models" else CONTEXTS.items():
        for change in changes(at(values, path)):
            try:
                if texts(put(values, path, change)) != unchanged(context):
                    return True
            except HelmError:
                continue  # not a value that may stand here
    return False


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [leaf for leaf in leaves(DEFAULTS) if leaf not in NAMED_BY_OTHERS],
    ids=lambda path: ".".join(map(str, path)),
)
def test_a_value_is_read(path: Path) -> None:
    assert matters(path)


def test_the_chart_sets_what_settings_may_not() -> None:
    """So that no variable is there twice."""
    objects = [o for name in SETS for o in rendered(name)]
    found = set()
    for maker in of_kind(objects, "Deployment"):
        container = maker["spec"]["template"]["spec"]["containers"][0]  # then sidecars
        names = [variable["name"] for variable in container["env"]]
        assert len(names) == len(set(names)), container["name"]
        known = {f"TANDEM_{field}".upper() for field in SERVICES[container["name"]].model_fields}
        assert {n for n in names if n.startswith("TANDEM_")} <= known, container["name"]
        found |= {name.removeprefix("TANDEM_").lower() for name in names} & SET_BY_CHART
    of_one_machine = {
        "redis_password", "redis_port", "shared_cores", "own_http_port",
        "store_port",
    }  # fmt: skip
    assert found == SET_BY_CHART - of_one_machine


def test_the_notes_say_the_next_command(value_set: str) -> None:
    values = values_of(value_set)
    text, redis = notes(values), values.get("redis", {})
    assert "helm -n serving test rel" in text
    assert ("bundled Redis is for trials" in text) is not bool(redis.get("url") or redis.get("existingSecret"))
    assert ("Nothing keeps other pods" in text) is (value_set == "bare")
