"""Every object is what the API server of three Kubernetes versions would take, and is consistent with the others."""

from __future__ import annotations

import pytest

from tests.helm.chart import name_of, rendered

VERSIONS = ("1.37", "1.36", "1.35")
# Groups whose objects Kubernetes itself has schemas for.
NATIVE = ("v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1", "batch/v1")


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_have_the_shape_that_kubernetes_knows(value_set: str, version: str) -> None:
    import kubernetes_validate

    for found in rendered(value_set):
        if found["apiVersion"] in NATIVE:
            kubernetes_validate.validate(found, version, strict=True)


def test_names_are_unique_and_fit(value_set: str) -> None:
    names = [name_of(found) for found in rendered(value_set)]
    assert sorted(names) == sorted(set(names))
    for name in names:
        assert len(name.partition("/")[2]) <= 63, name
