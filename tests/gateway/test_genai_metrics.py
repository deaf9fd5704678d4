from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from services.gateway.telemetry.genai import GenAIMetrics

pytestmark = pytest.mark.fast


def recorded(reader: InMemoryMetricReader) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Sums and attributes of each metric's points."""
    data = reader.get_metrics_data()
    found = [m for r in (data.resource_metrics if data else ()) for s in r.scope_metrics for m in s.metrics]
    return {m.name: [(p.sum, dict(p.attributes)) for p in m.data.data_points] for m in found}


def test_a_request_is_recorded_in_the_conventions_words() -> None:
    reader = InMemoryMetricReader()
    metrics = GenAIMetrics(MeterProvider([reader]).get_meter("test"))
    metrics.ended("chat", "m", "", (3.0, 1.0, 0.1), (20, 5))
    metrics.ended("chat", "m", "timeout", (9.0, None, None), (0, 0))  # moves nothing but the duration
    named = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "tandem", "gen_ai.request.model": "m"}
    assert recorded(reader) == {
        "gen_ai.server.request.duration": [(3.0, named), (9.0, {**named, "error.type": "timeout"})],
        "gen_ai.server.time_to_first_token": [(1.0, named)],
        "gen_ai.server.time_per_output_token": [(0.1, named)],
        "gen_ai.client.token.usage": [
            (20, {**named, "gen_ai.token.type": "input"}), (5, {**named, "gen_ai.token.type": "output"}),
        ],
    }  # fmt: skip
