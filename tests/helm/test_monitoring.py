"""Alerts and dashboards ask for what the catalogue of metrics has; each alert has a page, and fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import dashboards
from tandem.catalogue.metrics import CATALOGUES, MetricKind
from tests.helm.chart import of_kind, render, rendered, values_of

ROOT = Path(__file__).parents[2]
CHART, CASES = ROOT / "deploy" / "helm", Path(__file__).with_name("rules_test.yaml")
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((CHART / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
PROMTOOL = shutil.which("promtool") or ""
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="no promtool on the PATH")


def test_dashboards_are_as_the_code_says() -> None:
    stale = [path.name for path, text in dashboards.documents().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"


@pytest.mark.parametrize("secret", ["", "scraper"])
def test_prometheus_brings_its_key_to_gateways_alone(secret: str) -> None:
    made = render({**values_of("platform"), "monitoring": {"enabled": True, "apiKey": {"secret": secret}}})
    (gateways,), (workers,) = of_kind(made, "ServiceMonitor"), of_kind(made, "PodMonitor")
    (endpoint,), (other,) = gateways["spec"]["endpoints"], workers["spec"]["podMetricsEndpoints"]
    brought = {"credentials": {"name": secret, "key": "api-key"}} if secret else None
    assert endpoint.get("authorization") == brought
    assert (endpoint["path"], endpoint["port"]) == ("/metrics", "http")
    assert "authorization" not in other


@needs_promtool
@pytest.mark.parametrize("command", [("check", CHART / "rules.yaml"), ("test", CASES)], ids=["check", "test"])
def test_prometheus_takes_the_rules_and_they_say_what_they_should(command: tuple[str, Path]) -> None:
    verb, path = command
    done = subprocess.run(
        [PROMTOOL, verb, "rules", path], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_page_and_is_seen_to_fire_and_not_to() -> None:
    cases = [
        case
        for test in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
        for case in test.get("alert_rule_test", ())
    ]
    for name, rule in ALERTS.items():
        assert f"({name})" in (ROOT / rule["annotations"]["runbook"]).read_text(encoding="utf-8").splitlines()[0]
        assert {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name} == {True, False}, name
    pages = {path.name for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert pages == {Path(rule["annotations"]["runbook"]).name for rule in ALERTS.values()}


def charts() -> list[dashboards.Plot]:
    return [chart for page in dashboards.PAGES for row in page.rows.values() for chart in row]


def names_exposed() -> set[str]:
    found: set[str] = set()
    for one in (one for catalogue in CATALOGUES.values() for one in catalogue.values()):
        ends = ("_bucket", "_sum", "_count") if one.kind is MetricKind.HISTOGRAM else ("",)
        found |= {f"{one.exposed_as}{end}" for end in ends}
    return found


def test_what_is_asked_is_in_the_catalogue() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = [rule["expr"] for rule in RULES]
    asked += [
        query for page in dashboards.PAGES for row in page.rows.values() for c in row for query in c.queries.values()
    ]
    named = {name for query in asked for name in re.findall(r"\b(?:tandem_|tandem:|vllm:)[\w:]+", query)}
    assert named - names_exposed() - recorded == set()


def test_panels_that_pages_name_are_there() -> None:
    titles = {chart.title for chart in charts()}
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[SW] \*([^*]+)\*", text))
    assert len(named) > 12
    assert named <= titles


def test_the_chart_brings_them(value_set: str) -> None:
    objects = rendered(value_set)
    monitored = bool(of_kind(objects, "PodMonitor"))
    found = of_kind(objects, "PrometheusRule")
    assert len(found) == monitored
    for rule in found:
        assert rule["spec"] == yaml.safe_load((CHART / "rules.yaml").read_text(encoding="utf-8"))
    for config in of_kind(objects, "ConfigMap"):
        if "grafana_dashboard" in config["metadata"]["labels"]:
            assert {json.loads(text)["uid"] for text in config["data"].values()} == {p.uid for p in dashboards.PAGES}
