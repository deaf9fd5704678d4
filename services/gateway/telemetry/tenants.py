"""Usage by tenant, and how much of it met its class's targets, counted when a request ends.

    met            answered, and in time
    late_first     answered; its first token came later than its class's ttft_s
    slow           answered; its tokens came slower than its class's itl_s on the mean
    refused        429        failed   5xx

What is not the service's doing, 400 or a client that left, counts nowhere. Tenants beyond the first so many are one,
"other": each has series of its own. Who may not know tenants by name is shown the sums over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

from services.gateway.admission import PriorityClass
from services.gateway.settings import ClassName, ClassSettings
from tandem.catalogue.metrics import GATEWAY, CappedValues
from tandem.catalogue.tally import Count

TOO_MANY, ERROR = 429, 500
TOKENS = ("computed", "cached", "generated")


@dataclass(slots=True)
class RequestEnd:
    tenant: str
    priority_class: PriorityClass
    status: int
    ttft_s: float | None = None
    itl_s: float | None = None  # mean over the answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class TenantMetrics:
    def __init__(
        self, registry: CollectorRegistry, model: str, classes: Mapping[ClassName, ClassSettings], max_tenants: int
    ) -> None:
        self._model, self._classes = model, classes
        self._tenant = CappedValues(max_tenants)
        self._requests = GATEWAY["tandem_slo_requests"].counter_tally(registry)
        self._goodput = GATEWAY["tandem_goodput_tokens"].counter_tally(registry)
        self._tokens = GATEWAY["tandem_tenant_tokens"].counter_tally(registry)
        self._ttft = GATEWAY["tandem_tenant_ttft_seconds"].histogram_tally(registry)
        self._known: dict[tuple[str, str, str], list[Count]] = {}  # token counters by labels
        objective = GATEWAY["tandem_slo_objective"].gauge(registry)
        for name, settings in classes.items():
            objective.labels(model, name).set(settings.objective)

    def ended(self, end: RequestEnd) -> None:
        labels = self._model, end.priority_class.label, self._tenant(end.tenant)
        if (tokens := self._known.get(labels)) is None:
            tokens = self._known[labels] = [self._tokens.labels(*labels, kind) for kind in TOKENS]
        computed, cached, generated = tokens
        computed.value += max(end.prompt_tokens - end.cached_tokens, 0)  # workers report the cached part
        cached.value += end.cached_tokens
        generated.value += end.output_tokens
        if end.ttft_s is not None:
            self._ttft.labels(*labels).observe(end.ttft_s)
        if outcome := self._outcome(end):
            self._requests.labels(*labels, outcome).inc()
            if outcome == "met":
                self._goodput.labels(*labels).inc(end.output_tokens)

    def _outcome(self, end: RequestEnd) -> str:
        targets = self._classes[end.priority_class.label]
        if end.status != 200:
            return "refused" if end.status == TOO_MANY else "failed" if end.status >= ERROR else ""
        if targets.ttft_s is not None and end.ttft_s is not None and end.ttft_s > targets.ttft_s:
            return "late_first"
        if targets.itl_s is not None and end.itl_s is not None and end.itl_s > targets.itl_s:
            return "slow"
        return "met"


def without_tenants(family: Metric) -> Metric:
    """Returns a counter or histogram summed over tenants; the label stays, empty."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in family.samples:
        labels = {**sample.labels, "tenant": ""} if "tenant" in sample.labels else sample.labels
        key = sample.name, tuple(labels.items())
        before = sums[key].value if key in sums else 0.0
        sums[key] = sample._replace(labels=labels, value=before + sample.value)
    family.samples = list(sums.values())
    return family
