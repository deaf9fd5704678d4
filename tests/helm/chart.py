"""The chart as Helm's own engine renders it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Object: TypeAlias = dict[str, Any]
Values: TypeAlias = dict[str, Any]

CHART = Path(__file__).parents[2] / "deploy" / "helm"
RELEASE, NAMESPACE = "rel", "serving"
SETS = {path.stem: path for path in sorted((CHART / "ci").glob("*.yaml"))}


def values_of(name: str) -> Values:
    return yaml.safe_load(SETS[name].read_text(encoding="utf-8")) or {}


@cache
def loaded(chart: Path = CHART) -> Any:
    # Imported when needed: its library takes a while to load.
    from helm_python import Chart

    return Chart.load(chart)


def texts(values: Values, release: str = RELEASE, namespace: str = NAMESPACE, chart: Path = CHART) -> dict[str, str]:
    """Each template's text. Raises helm_python.HelmError with what Helm would print."""
    found: dict[str, str] = loaded(chart).render(values, name=release, namespace=namespace)
    return found


def render(values: Values, release: str = RELEASE, namespace: str = NAMESPACE, chart: Path = CHART) -> list[Object]:
    """Every object, tests included."""
    manifests = [
        t for name, t in sorted(texts(values, release, namespace, chart).items()) if not name.endswith("NOTES.txt")
    ]
    return [found for text in manifests for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def notes(values: Values) -> str:
    return next(text for name, text in texts(values).items() if name.endswith("NOTES.txt"))


@cache
def _rendered(name: str) -> list[Object]:
    return render(values_of(name))


def rendered(name: str) -> list[Object]:
    """The objects of one of the value sets in ci/."""
    return deepcopy(_rendered(name))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def name_of(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name, and labels and spec, of everything that makes pods."""
    for found in objects:
        if found["kind"] == "Pod":
            yield name_of(found), found
        elif found["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name_of(found), found["spec"]["template"]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
