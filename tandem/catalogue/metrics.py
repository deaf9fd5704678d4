"""The catalogue of metrics: each series that a process exposes, and what it counts. docs/metrics.md is made from it.

Where vLLM has the same metric, name and meaning are vLLM's, so that its dashboards work. A series that is not in the
catalogue cannot be made: the code that fills a series gets it from here by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tandem.catalogue.tally import CounterTally, HistogramTally


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """A metric. A counter's name is without its `_total`."""

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_as(self) -> str:
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name

    def counter_tally(self, registry: CollectorRegistry) -> CounterTally:
        """Returns the series' counter for one thread, or for several that take turns."""
        return CounterTally(self, registry)

    def histogram_tally(self, registry: CollectorRegistry) -> HistogramTally:
        """Returns the series' histogram for one thread, or for several that take turns."""
        return HistogramTally(self, registry)

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.text, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.text, self.labels, registry=registry, buckets=self.buckets)

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Returns the family for a collector that adds a counter's or gauge's value at each scrape."""
        family = CounterMetricFamily if self.kind is MetricKind.COUNTER else GaugeMetricFamily
        return family(self.name, self.text, labels=self.labels)

    def histogram_family(self) -> HistogramMetricFamily:
        """Returns the family for a collector that adds buckets at each scrape."""
        return HistogramMetricFamily(self.name, self.text, labels=self.labels)


class CappedValues:
    """Values of a label: the first `most` distinct ones; all later ones become OTHER."""

    OTHER = "other"

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self._most:
                return self.OTHER
            self._known.add(value)
        return value


# Deadlines are minutes long: the last bounds separate requests that nearly missed a deadline from earlier ones.
LONG = (120.0, 240.0, 480.0, 600.0)
TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 320.0, 600.0,
)  # fmt: skip
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, *LONG)
E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, *LONG)
REFUSED = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = tuple(float(2**power) for power in range(18))

MODEL = ("model_name",)
CLASS = (*MODEL, "priority_class")
TENANT = (*CLASS, "tenant")
COARSE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
WORKER_LABELS = (*MODEL, "role", "worker")


def _by_name(series: Iterator[Series]) -> Mapping[str, Series]:
    return {one.name: one for one in series}


def _choices() -> Iterator[Series]:
    """Yields the series of the choices of gateways' answers, under vLLM's names."""
    gauge, histogram = MetricKind.GAUGE, MetricKind.HISTOGRAM
    yield Series("vllm:num_requests_waiting", gauge, "Choices accepted that have no token yet, queued ones too.", MODEL)
    yield Series("vllm:num_requests_running", gauge, "Choices between their first token and their last.", MODEL)
    text = "From a choice's acceptance to its first token."
    yield Series("vllm:time_to_first_token_seconds", histogram, text, MODEL, TTFT)
    text = "Between messages of one choice, per token."
    yield Series("vllm:inter_token_latency_seconds", histogram, text, MODEL, ITL)
    text = "Mean time between a choice's tokens, its first left out; of choices that ended well with two or more."
    yield Series("vllm:request_time_per_output_token_seconds", histogram, text, MODEL, ITL)
    text = "From a choice's acceptance to its last token, if it ended well."
    yield Series("vllm:e2e_request_latency_seconds", histogram, text, MODEL, E2E)
    text = "Time that a choice waited for its turn at the gateway, if it then got one or not."
    yield Series("vllm:request_queue_time_seconds", histogram, text, CLASS, QUEUE)
    text = "From a choice's turn to its first token, if it ended well: route, reserve, prefill and KV transfer."
    yield Series("vllm:request_prefill_time_seconds", histogram, text, MODEL, E2E)
    text = "Of a choice that ended well, prefill and decode: from its turn to its end."
    yield Series("vllm:request_inference_time_seconds", histogram, text, MODEL, E2E)
    text = "From a choice's first token to its last, if it ended well."
    yield Series("vllm:request_decode_time_seconds", histogram, text, MODEL, E2E)
    yield Series("vllm:request_prompt_tokens", histogram, "Prompt tokens of a choice that ended well.", MODEL, TOKENS)
    text = "Tokens of a choice that ended well."
    yield Series("vllm:request_generation_tokens", histogram, text, MODEL, TOKENS)
    text = "Of the prompt of a choice that ended well, those that were not found in a prefix cache."
    yield Series("vllm:request_prefill_kv_computed_tokens", histogram, text, MODEL, TOKENS)
    yield Series("vllm:request_params_n", histogram, "`n` of a request that was answered with 200.", MODEL, TOKENS[:8])
    text = "Most tokens that a request which was answered with 200 allowed a choice."
    yield Series("vllm:request_params_max_tokens", histogram, text, MODEL, TOKENS)
    text = "Tokens of the longest choice of a request that was answered with 200."
    yield Series("vllm:request_max_num_generation_tokens", histogram, text, MODEL, TOKENS)


def _gateway() -> Iterator[Series]:
    """Yields the gateway's other series."""
    counter, gauge, histogram = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
    yield Series("vllm:prompt_tokens", counter, "Prompt tokens of choices that ended well.", MODEL)
    yield Series("vllm:generation_tokens", counter, "Tokens of all choices, as they come; of failed ones too.", MODEL)
    yield Series("vllm:request_success", counter, "Choices that ended well.", (*MODEL, "finished_reason"))
    yield Series("vllm:prefix_cache_queries", counter, "Prompt tokens of requests that were answered with 200.", MODEL)
    yield Series("vllm:prefix_cache_hits", counter, "Of these, those found in prefix caches.", MODEL)
    text = "Prompt tokens of choices that ended well, found in prefix caches."
    yield Series("vllm:prompt_tokens_cached", counter, text, MODEL)
    yield Series("vllm:spec_decode_num_draft_tokens", counter, "Tokens proposed ahead.", MODEL)
    yield Series("vllm:spec_decode_num_accepted_tokens", counter, "Proposed tokens that were right.", MODEL)
    text = "Share of the decode workers' KV blocks that sequences hold, as last reported; 1 is all."
    yield Series("vllm:kv_cache_usage_perc", gauge, text, MODEL)
    text = "Requests that ended, by path (remote, local, none) and HTTP status; 499 is a client that left."
    yield Series("tandem_requests", counter, text, ("path", "status"))
    text = "Requests by the model's fingerprint; there are two while other files of a model are rolled out."
    yield Series("tandem_model_requests", counter, text, (*MODEL, "fingerprint"))
    text = "Requests that named an alias, by the model that answers, chosen by weight or as fallback."
    yield Series("tandem_alias_requests", counter, text, ("alias", *MODEL, "chosen_by"))
    text = "Requests that ended with an error, by HTTP status and the error's code (docs/api.md)."
    yield Series("tandem_errors", counter, text, ("status", "reason"))
    text = "Choosing a pair of workers and reserving there, each time."
    yield Series("tandem_route_seconds", histogram, text, MODEL, REFUSED)
    text = "From a request's arrival to its 429, inside the gateway."
    yield Series("tandem_refused_after_seconds", histogram, text, MODEL, REFUSED)
    yield Series("tandem_kv_transfer_bytes", counter, "KV bytes moved for requests.", ("transport",))
    text = "Choices that did not take the path they should: no pair could take them, Redis was gone, a worker died."
    yield Series("tandem_fallbacks", counter, text, ("path", "reason"))
    yield Series("tandem_migrations", counter, "Times that a choice went on on other workers.", MODEL)
    yield Series("tandem_num_requests_queued", gauge, "Choices that wait for their turn.", CLASS)
    yield Series("tandem_admitted_requests", gauge, "Choices let into the cluster.", MODEL)
    yield Series("tandem_admitted_tokens", gauge, "Their prompts and all that they may write.", MODEL)
    yield Series("tandem_replica_blocks", gauge, "KV blocks whose holders are known.")
    text = "KV blocks forgotten because more were reported than fit."
    yield Series("tandem_replica_dropped_blocks", counter, text)
    yield Series("tandem_replica_rereads", counter, "Workers whose blocks were read anew, whole.")


def _on_demand() -> Iterator[Series]:
    text = "1 while a model that starts when it is asked for has its workers, else 0."
    yield Series("tandem_on_demand_awake", MetricKind.GAUGE, text, MODEL)
    text = "Its last start, as its launcher measured it; 0 before."
    yield Series("tandem_on_demand_start_seconds", MetricKind.GAUGE, text, MODEL)
    text = "Time that a request waited for its model to start, if it then was served or not."
    yield Series("tandem_on_demand_wait_seconds", MetricKind.HISTOGRAM, text, MODEL, E2E)


def _tenants() -> Iterator[Series]:
    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE
    text = "Requests by how they ended (met, late_first, slow, refused, failed: docs/slo.md); not 400s, not 499s."
    yield Series("tandem_slo_requests", counter, text, (*TENANT, "outcome"))
    text = "Share of a class's requests that should be met, as its settings say."
    yield Series("tandem_slo_objective", gauge, text, CLASS)
    yield Series("tandem_goodput_tokens", counter, "Tokens of requests that were met.", TENANT)
    text = "Tokens of requests that ended: prompt tokens computed or cached, generated ones."
    yield Series("tandem_tenant_tokens", counter, text, (*TENANT, "kind"))
    text = "From a request's arrival to its first token."
    yield Series("tandem_tenant_ttft_seconds", MetricKind.HISTOGRAM, text, TENANT, COARSE)


def _cluster() -> Iterator[Series]:
    counter, gauge, labels = MetricKind.COUNTER, MetricKind.GAUGE, (*MODEL, "role")
    yield Series("tandem_live_workers", gauge, "Workers of the model with a live lease.", labels)
    text = "Workers that were not there when this was last read, first starts and later ones."
    yield Series("tandem_worker_starts", counter, text, labels)
    text = "Price of a worker's hour, as the settings say."
    yield Series("tandem_price_per_worker_hour", gauge, text, labels)
    yield Series("tandem_registry_reached", gauge, "1 while the registry has been read of late.")
    text = "Rows of the registry that could not be read and were skipped, by kind; mended: wrong values taken away."
    yield Series("tandem_registry_unreadable_rows", counter, text, ("kind",))


def _process() -> Iterator[Series]:
    text = "When the certificate of the cluster's TLS ends, in Unix seconds; 0 if its CA's clients refuse it."
    yield Series("tandem_certificate_expiry_timestamp_seconds", MetricKind.GAUGE, text)


def _worker() -> Iterator[Series]:
    counter, gauge, labels = MetricKind.COUNTER, MetricKind.GAUGE, WORKER_LABELS
    yield Series("tandem_queued_tokens", gauge, "Prompt tokens accepted and not yet computed.", labels)
    yield Series("tandem_running_sequences", gauge, "Sequences that run or wait.", labels)
    yield Series("tandem_kv_blocks", gauge, "KV blocks.", labels)
    yield Series("tandem_kv_usage", gauge, "Share of the KV blocks that live sequences use; 1 is all.", labels)
    yield Series("tandem_read_tokens", counter, "Prompt tokens computed.", labels)
    yield Series("tandem_written_tokens", counter, "Tokens decoded.", labels)
    yield Series("tandem_proposed_tokens", counter, "Tokens proposed ahead.", labels)
    yield Series("tandem_accepted_tokens", counter, "Proposed tokens that were right.", labels)
    yield Series("vllm:num_preemptions", counter, "Sequences that had to leave their blocks.", labels)
    yield Series("tandem_swapped_preemptions", counter, "Of these, those whose KV went to host memory.", labels)
    yield Series("tandem_aborted_sequences", counter, "Sequences aborted.", labels)
    yield Series("tandem_aborted_blocks", counter, "KV blocks that aborted sequences released.", labels)
    text = "Cached KV blocks that were overwritten, as no other was free."
    yield Series("tandem_evicted_blocks", counter, text, labels)
    tier = (*labels, "tier")
    text = "1 where KV of a tier below the cache (host, disk) is used; 0 for a while after it failed or did not answer."
    yield Series("tandem_kv_tier_up", gauge, text, tier)
    yield Series("tandem_kv_tier_blocks", gauge, "KV blocks that a tier has.", tier)
    yield Series("tandem_kv_tier_written_blocks", counter, "KV blocks written to a tier.", tier)
    text = "KV blocks restored from a tier. None for long, where many are written: it is of no use."
    yield Series("tandem_kv_tier_restored_blocks", counter, text, tier)
    yield Series("tandem_kv_tier_damaged_blocks", counter, "KV blocks that were damaged, and removed.", tier)
    text = "Of this worker's start: its process, weights, kernels with KV, and a prefill worker's first link."
    yield Series("tandem_cold_start_seconds", gauge, text, (*labels, "part"))
    yield Series("tandem_adapters", gauge, "LoRA adapters in memory.", labels)
    text = "Tokens of an engine step, prompt tokens and decoded ones."
    yield Series("vllm:iteration_tokens_total", MetricKind.HISTOGRAM, text, labels, TOKENS)
    text = "Sequences that the engine has while it steps."
    yield Series("tandem_batch_sequences", MetricKind.HISTOGRAM, text, labels, TOKENS[:13])
    yield Series("tandem_step_seconds", counter, "Time of engine steps that computed something.", labels)
    text = "Time for which engine steps may have waited while blocks were taken for tiers or other workers."
    yield Series("tandem_moving_seconds", counter, text, labels)


def _transfers() -> Iterator[Series]:
    counter, histogram = MetricKind.COUNTER, MetricKind.HISTOGRAM
    pair = *WORKER_LABELS, "peer", "transport"
    text = "From a transfer's first layer pushed until the decode worker has verified all of its frames."
    yield Series("tandem_transfer_seconds", histogram, text, pair, TTFT)
    text = "Of that, from the commit, when nothing is left to compute, until decode may start."
    yield Series("tandem_transfer_exposed_seconds", histogram, text, (*WORKER_LABELS, "transport"), TTFT)
    yield Series("tandem_transfer_bytes", counter, "KV bytes that a decode worker has verified.", pair)
    text = "Transfers that ended with an error of the link or the decode worker; not those whose request was aborted."
    yield Series("tandem_transfer_failures", counter, text, (*pair, "code"))


def _links() -> Iterator[Series]:
    text = "1 where KV can go to this decode worker; 0 for one that is in the registry, and cannot be reached."
    yield Series("tandem_link_up", MetricKind.GAUGE, text, (*WORKER_LABELS, "peer"))
    text = (
        "1 where that link is not by the transport that was named first, for it was refused; `tandem doctor` says why."
    )
    yield Series("tandem_link_fallback", MetricKind.GAUGE, text, (*WORKER_LABELS, "peer"))


def _kvstore() -> Iterator[Series]:
    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE
    yield Series("tandem_registry_up", gauge, "1 while Redis answered the last sweep.")
    text = "From asking Redis to forget what is past its time until it has."
    yield Series("tandem_sweep_seconds", MetricKind.HISTOGRAM, text, (), REFUSED)
    yield Series("tandem_registry_workers", gauge, "Workers with a live lease.")
    yield Series("tandem_registry_reservations", gauge, "Reservations that gateways hold for requests.")
    text = "What a sweep found past its time: lease, reservation, block."
    yield Series("tandem_registry_expired", counter, text, ("kind",))
    yield Series("tandem_redis_deaths", counter, "Times that the redis-server started here died, and came back empty.")


GATEWAY = _by_name(chain(_choices(), _gateway(), _on_demand(), _tenants(), _cluster()))
PROCESS = _by_name(_process())
WORKER = _by_name(_worker())
TRANSFERS, LINKS = _by_name(_transfers()), _by_name(_links())
KVSTORE = _by_name(_kvstore())
CATALOGUES = {
    "Gateway": GATEWAY,
    "Prefill and decode workers": WORKER,
    "Prefill workers": {**TRANSFERS, **LINKS},
    "The kvstore": KVSTORE,
    "Each of them, where the cluster has TLS": PROCESS,
}
