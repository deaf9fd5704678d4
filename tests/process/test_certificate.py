from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from tandem.process import certificate
from tests.authority import Authority

DAY_S = 86400


def test_a_certificate_ends_when_it_says(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ca").issue("one")
    assert abs(certificate.expiry_of(tls) - time.time() - 2 * DAY_S) < 600
    registry = CollectorRegistry()
    certificate.watch(registry, tls)
    value = registry.get_sample_value("tandem_certificate_expiry_timestamp_seconds")
    assert value == certificate.expiry_of(tls)


def test_one_of_a_stranger_or_none_at_all_has_ended(tmp_path: Path) -> None:
    tls, other = Authority(tmp_path / "ca").issue("one"), Authority(tmp_path / "other").issue("one")
    assert certificate.expiry_of(replace(tls, ca=other.ca)) == 0
    assert certificate.expiry_of(replace(tls, certificate=tmp_path / "nothing")) == 0


def test_without_tls_there_is_no_such_metric() -> None:
    registry = CollectorRegistry()
    certificate.watch(registry, None)
    assert list(registry.collect()) == []
