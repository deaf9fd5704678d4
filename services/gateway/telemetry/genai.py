"""Server metrics of the GenAI semantic conventions, through OpenTelemetry's API, for collectors by OTLP.

They are exported only if tandem/process/telemetry.py is configured to.
"""

from __future__ import annotations

from opentelemetry import metrics
from opentelemetry.metrics import Meter as OTelMeter

from tandem.catalogue.metrics import E2E, ITL, TOKENS, TTFT

PROVIDER = "tandem"


class GenAIMetrics:
    def __init__(self, meter: OTelMeter | None = None) -> None:
        meter = meter or metrics.get_meter("tandem.gateway")

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> metrics.Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=buckets)

        self._duration = seconds("gen_ai.server.request.duration", "From a request's arrival to its end.", E2E)
        self._first = seconds("gen_ai.server.time_to_first_token", "From a request's arrival to its first token.", TTFT)
        self._gap = seconds("gen_ai.server.time_per_output_token", "Mean time between its tokens.", ITL)
        text = "Tokens of a request's prompts, and of its answers."
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", text, explicit_bucket_boundaries_advisory=TOKENS
        )

    def ended(
        self, operation: str, model: str, error: str, times: tuple[float, float | None, float | None],
        tokens: tuple[int, int],
    ) -> None:  # fmt: skip
        """Count a request that has ended.

        Args:
            error: its type; empty where it was answered.
            times: duration, TTFT, mean ITL, in seconds.
            tokens: of prompts, of answers.
        """
        named = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}
        whole, first, gap = times
        self._duration.record(whole, {**named, "error.type": error} if error else named)
        if first is not None:
            self._first.record(first, named)
        if gap is not None:
            self._gap.record(gap, named)
        if tokens[1]:
            for kind, count in zip(("input", "output"), tokens, strict=True):
                self._tokens.record(count, {**named, "gen_ai.token.type": kind})
