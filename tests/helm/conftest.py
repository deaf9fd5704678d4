from __future__ import annotations

import pytest

from tests.helm.chart import SETS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`value_set` stands for each of the value sets in deploy/helm/ci."""
    if "value_set" in metafunc.fixturenames:
        metafunc.parametrize("value_set", sorted(SETS))
