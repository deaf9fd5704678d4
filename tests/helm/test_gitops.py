"""The chart under tools that render it anew and apply it server-side: the same objects, and no entry twice."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.helm.chart import CHART, SETS, Values, name_of, of_kind, render, rendered, values_of, yaml

# Lists that Kubernetes merges by a key, and refuses where two entries have the same.
MERGED_BY = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}


def with_secrets(values: Values) -> Values:
    """The same release, with nothing left for the chart to make up."""
    secrets = ("apiKeys", "cluster", "redis", "store")
    given = {name: {**values.get(name, {}), "existingSecret": f"my-{name}"} for name in secrets}
    for name in ("redis", "store"):
        given[name].pop("url", None)
    return values | given


@pytest.mark.parametrize("name", SETS)
def test_rendered_twice_it_is_the_same(name: str) -> None:
    values = with_secrets(values_of(name))
    assert render(values) == render(values)


@pytest.mark.parametrize("name", SETS)
def test_only_secrets_that_were_not_given_differ(name: str) -> None:
    again = render(values_of(name))
    assert {b["kind"] for a, b in zip(rendered(name), again, strict=True) if a != b} <= {"Secret"}


@pytest.mark.parametrize("name", SETS)
def test_no_object_and_no_entry_of_a_list_is_there_twice(name: str) -> None:
    objects = rendered(name)
    assert [found for found, times in Counter(map(name_of, objects)).items() if times > 1] == []
    assert [(name_of(found), twice) for found in objects for twice in doubled(found)] == []


def doubled(value: Any) -> Iterator[tuple[str, str]]:
    """Lists within, each with an entry that is in it twice."""
    if isinstance(value, list):
        for one in value:
            yield from doubled(one)
    elif isinstance(value, dict):
        for field, inner in value.items():
            by = MERGED_BY.get(field)
            if by and isinstance(inner, list):
                yield from ((field, key) for key, n in Counter(one[by] for one in inner).items() if n > 1)
            if field == "ports" and isinstance(inner, list):
                ports = Counter(
                    (one.get("containerPort", one.get("port")), one.get("protocol", "TCP")) for one in inner
                )
                yield from ((field, str(port)) for port, times in ports.items() if times > 1)
            yield from doubled(inner)


def test_a_doubled_entry_would_be_seen() -> None:
    objects = of_kind(rendered("bare"), "Deployment")
    pod = objects[0]["spec"]["template"]["spec"]["containers"][0]
    pod["env"].append(pod["env"][0])
    assert list(doubled(objects[0])) == [("env", pod["env"][0]["name"])]


def test_artifact_hub_learns_what_it_shows() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    said = chart["annotations"]
    assert said["artifacthub.io/license"] == "Apache-2.0"
    assert [change["kind"] for change in yaml.safe_load(said["artifacthub.io/changes"])]
    kind, _, icon = chart["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(b64decode(icon)).tag.endswith("svg")


# Parts that are Kubernetes' own, or that a setting's own words describe.
OTHERS = ("env", "peers", "resources", "claims", "fallback", "ref", "classes", "null_step")


def test_the_schema_describes_each_part_of_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert [".".join(path) for path in undescribed(schema) if not {*path} & {*OTHERS}] == []
    assert schema["properties"]["gateway"]["properties"]["replicas"]["description"] == "Pods, where nothing scales them"
    assert schema["$defs"]["workerSettings"]["properties"]["kv_disk"]["description"].startswith("disk for KV blocks")


def undescribed(at: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of what has no description."""
    for key, part in {**at.get("properties", {}), **at.get("$defs", {})}.items():
        if "description" not in part and key not in at.get("$defs", ()):
            yield *path, key
        yield from undescribed(part, (*path, key))
    for inner in (at.get("items"), at.get("additionalProperties")):
        yield from undescribed(inner, path) if isinstance(inner, dict) else ()
