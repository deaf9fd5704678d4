"""Metrics of a gateway for Prometheus; tandem/catalogue/metrics.py says what each series means.

queued    accepted, not let into the cluster yet
waiting   accepted, no token yet: queued ones too        running   from the first token to the last
fallback  a choice that did not take the path it should: no pair could take it, Redis was gone, or its worker died
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from services.gateway.admission import Admission, PriorityClass
from services.gateway.errors import GatewayError
from services.gateway.settings import CLASSES, ClassName, ClassSettings
from services.gateway.telemetry.cluster import ClusterCollector
from services.gateway.telemetry.genai import GenAIMetrics
from services.gateway.telemetry.tenants import TenantMetrics, without_tenants
from services.gateway.workers import WorkerPool
from tandem.catalogue.metrics import GATEWAY, ITL
from tandem.catalogue.tally import BucketCounts, Count
from tandem.process import metrics_server
from tandem.registry import BlockReplica, ClusterView, LiveWorker, ModelStatus, Role, Wakefulness
from tandem.v1 import llm_pb2

PATHS = {llm_pb2.Path.KIND_REMOTE_PREFILL: "remote", llm_pb2.Path.KIND_LOCAL_PREFILL: "local"}

LOOKED_AT = (
    "vllm:time_to_first_token_seconds_bucket", "tandem_slo_requests_total", "tandem_goodput_tokens_total",
    "tandem_requests_total", "vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_bucket",
)  # fmt: skip
NUM_GAPS = len(ITL) + 1  # one more for values beyond the last bound


class FrontMetrics:
    """The gateway's own metrics, and those of all models as Prometheus reads them."""

    def __init__(
        self, classes: Mapping[ClassName, ClassSettings] = CLASSES, max_tenants: int = 100,
        prices: Mapping[Role, float] | None = None, catch_up: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            prices: of a worker's hour, by role.
            catch_up: counts ended requests that are not counted yet.
        """
        self._catch_up = catch_up
        self.registry, self._exposed, self._nameless = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
        self._exposed.register(_Together(self))
        self._nameless.register(_Together(self, names_tenants=False))
        self._classes, self._max_tenants, self._prices = classes, max_tenants, prices or {}
        self.of_models: dict[str, Metrics] = {}
        self._of_the_gone: dict[str, float] = {}  # totals of dropped models, so that totals never fall
        self.genai = GenAIMetrics()
        self._requests = GATEWAY["tandem_requests"].counter_tally(self.registry)
        self._errors = GATEWAY["tandem_errors"].counter_tally(self.registry)
        self._transfer_bytes = GATEWAY["tandem_kv_transfer_bytes"].counter_tally(self.registry)
        self._fallbacks = GATEWAY["tandem_fallbacks"].counter_tally(self.registry)
        self._refused = GATEWAY["tandem_refused_after_seconds"].histogram_tally(self.registry)
        self._aliases = GATEWAY["tandem_alias_requests"].counter_tally(self.registry)
        self._waits = GATEWAY["tandem_on_demand_wait_seconds"].histogram_tally(self.registry)

    def of(self, model: str) -> Metrics:
        """Returns the metrics of a model, made when it is first served."""
        if model not in self.of_models:
            self.of_models[model] = Metrics(model, self, self._classes, self._max_tenants, self._prices)
        return self.of_models[model]

    def request(self, path: str, status: int) -> None:
        """Count a request that has ended; 499: its client disconnected."""
        self._requests.labels(path, str(status)).inc()

    def error(self, error: GatewayError) -> None:
        """Count a request that failed."""
        self._errors.labels(str(error.status), error.code or error.type).inc()

    def alias(self, name: str, model: str, chosen_by: str) -> None:
        """Count a request that an alias sent to the model."""
        self._aliases.labels(name, model, chosen_by).inc()

    def waited(self, model: str, seconds: float) -> None:
        """Count the time that a request waited for its model to start."""
        self._waits.labels(model).observe(seconds)

    def refused(self, seconds: float, model: str = "") -> None:
        """Count a request that got a 429, and how long after its arrival."""
        self._refused.labels(model).observe(seconds)

    def path(self, path: llm_pb2.Path, fallback: str) -> None:
        """Count the path of one choice. `fallback`: why it is not the intended one, or ""."""
        if path.transport:
            self._transfer_bytes.labels(path.transport).inc(path.transfer_bytes)
        if fallback:
            self._fallbacks.labels(PATHS[path.kind], fallback).inc()

    def watch_replica(self, replica: BlockReplica) -> None:
        """Report the replica of prefix caches at each scrape."""
        self.registry.register(_ReplicaCollector(replica))

    def watch_sleepers(self, statuses: Callable[[], Iterable[ModelStatus]]) -> None:
        self.registry.register(_SleepersCollector(statuses))

    def watch_view(self, view: ClusterView) -> None:
        reached = GATEWAY["tandem_registry_reached"].gauge(self.registry)
        reached.set_function(lambda: float(not view.stale))
        self.registry.register(_UnreadableCollector(view.registry.unreadable.found))

    def totals(self) -> Totals:
        """Returns the totals over all tenants and models, dropped models included. Cheap: reads few series."""
        self._catch_up()
        found = dict(self._of_the_gone)
        _add(found, self.registry.restricted_registry(LOOKED_AT))
        for model in list(self.of_models.values()):
            model.add_to(found)
        return Totals(found)

    def forget(self, model: str) -> None:
        """Stop exposing a model's metrics."""
        if (metrics := self.of_models.pop(model, None)) is not None:
            metrics.add_to(self._of_the_gone)

    def exposition(self, accept: str = "", names_tenants: bool = True) -> tuple[bytes, str]:
        """Returns the exposition in the format that `accept` asks for, and its content type."""
        self._catch_up()
        return metrics_server.exposition(self._exposed if names_tenants else self._nameless, accept)


class _Together(Collector):
    """The series of all models, one family a name."""

    def __init__(self, front: FrontMetrics, *, names_tenants: bool = True) -> None:
        self._front, self._names_tenants = front, names_tenants

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for registry in (self._front.registry, *(one.registry for one in self._front.of_models.values())):
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values() if self._names_tenants else map(without_tenants, families.values())


class Metrics:
    """The metrics of one model, over all its fingerprints."""

    def __init__(
        self, model: str, front: FrontMetrics, classes: Mapping[ClassName, ClassSettings], max_tenants: int,
        prices: Mapping[Role, float],
    ) -> None:  # fmt: skip
        self.registry = registry = CollectorRegistry()
        self._model, self._front = model, front
        self.tenants, self.genai = TenantMetrics(registry, model, classes, max_tenants), front.genai
        self.request, self.error, self.path = front.request, front.error, front.path

        def counter(name: str) -> Count:
            return GATEWAY[name].counter_tally(registry).labels(model)

        def histogram(name: str) -> BucketCounts:
            return GATEWAY[name].histogram_tally(registry).labels(model)

        self.num_waiting = self.num_running = 0
        for name, count in (("waiting", lambda: self.num_waiting), ("running", lambda: self.num_running)):
            GATEWAY[f"vllm:num_requests_{name}"].gauge(registry).labels(model).set_function(count)
        self.ttft = histogram("vllm:time_to_first_token_seconds")
        self.ended = _Ended(histogram, counter)
        self.route_s = histogram("tandem_route_seconds")
        self.gaps, self.tokens = histogram("vllm:inter_token_latency_seconds"), counter("vllm:generation_tokens")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits")
        self.proposed_tokens = counter("vllm:spec_decode_num_draft_tokens")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens")
        self._success = GATEWAY["vllm:request_success"].counter_tally(registry)
        self.migrations = counter("tandem_migrations")
        self._queued = GATEWAY["vllm:request_queue_time_seconds"].histogram_tally(registry)
        self._of_fingerprints = GATEWAY["tandem_model_requests"].counter_tally(registry)
        self._admissions: list[Admission] = []
        self._pools: list[WorkerPool] = []
        self._watch()
        registry.register(ClusterCollector(self._workers, model, prices))

    def choice(self, now: Callable[[], float], trace_id: str = "") -> Meter:
        """Returns the meter of a choice that is accepted now. `trace_id`: its exemplar, if the trace is kept."""
        return Meter(self, now, {"trace_id": trace_id} if trace_id else None)

    def of_fingerprint(self, fingerprint: str) -> Count:
        return self._of_fingerprints.labels(self._model, fingerprint)

    def success(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def refused(self, seconds: float) -> None:
        """Count a request that got a 429, and how long after its arrival."""
        self._front.refused(seconds, self._model)

    def queued(self, kind: PriorityClass, seconds: float) -> None:
        self._queued.labels(self._model, kind.label).observe(seconds)

    def begin(self, admission: Admission, pool: WorkerPool) -> None:
        """Add a fingerprint's admission and pool to the gauges."""
        self._admissions.append(admission)
        self._pools.append(pool)

    def end(self, admission: Admission, pool: WorkerPool) -> None:
        """Remove them again; after the last one the model's series are dropped."""
        self._admissions.remove(admission)
        self._pools.remove(pool)
        if not self._pools:
            self._front.forget(self._model)

    def add_to(self, found: dict[str, float]) -> None:
        """Add the model's part to totals."""
        _add(found, self.registry.restricted_registry(LOOKED_AT))

    def _watch(self) -> None:
        """Report waiting and admitted work and KV usage at each scrape."""

        def of_all(count: Callable[[Admission], int]) -> Callable[[], float]:
            return lambda: sum(map(count, self._admissions))

        queued = GATEWAY["tandem_num_requests_queued"].gauge(self.registry)
        for kind in PriorityClass:
            queued.labels(self._model, kind.label).set_function(of_all(partial(_num_waiting, kind)))
        for name, count in (
            ("tandem_admitted_requests", of_all(lambda admission: len(admission.admitted))),
            ("tandem_admitted_tokens", of_all(lambda admission: admission.admitted.tokens)),
            ("vllm:kv_cache_usage_perc", self._kv_usage),
        ):
            GATEWAY[name].gauge(self.registry).labels(self._model).set_function(count)

    def _workers(self) -> list[LiveWorker]:
        return [worker for pool in self._pools for worker in pool.workers]

    def _kv_usage(self) -> float:
        decodes = [worker for worker in self._workers() if worker.info.role is Role.DECODE]
        blocks = sum(worker.info.num_blocks for worker in decodes)
        return 1 - sum(worker.load.free_blocks for worker in decodes) / blocks if blocks else 0.0


def _add(found: dict[str, float], part: Collector) -> None:
    """Add a collector's samples by series and bucket, or by whether a target was met."""
    for family in part.collect():
        for sample in family.samples:
            key = sample.labels.get("le") or ("met" if sample.labels.get("outcome") == "met" else "")
            name = f"{sample.name} {key}"
            found[name] = found.get(name, 0.0) + sample.value


def _num_waiting(kind: PriorityClass, admission: Admission) -> int:
    return admission.num_waiting(kind)


class Totals:
    """Counters and histograms at one time."""

    def __init__(self, found: Mapping[str, float]) -> None:
        self._found = found

    def count(self, name: str) -> float:
        return self._found.get(f"{GATEWAY[name].exposed_as} ", 0.0)

    @property
    def outcomes(self) -> tuple[float, float]:
        """Returns requests that met their targets, and counted requests that did not."""
        name = GATEWAY["tandem_slo_requests"].exposed_as
        return self._found.get(f"{name} met", 0.0), self._found.get(f"{name} ", 0.0)

    def buckets(self, name: str) -> list[float]:
        """Returns cumulative bucket counts; the last has no bound."""
        bounds = *map(str, GATEWAY[name].buckets), "+Inf"
        return [self._found.get(f"{name}_bucket {bound}", 0.0) for bound in bounds]


class Meter:
    """Measures one choice from waiting to running to its end. Must be closed."""

    __slots__ = ("_all_gaps", "_born", "_exemplar", "_first", "_last", "_metrics", "_now", "_num_tokens", "gaps")

    def __init__(self, metrics: Metrics, now: Callable[[], float], exemplar: dict[str, str] | None) -> None:
        self._metrics, self._all_gaps, self._exemplar = metrics, metrics.gaps, exemplar
        self._now = now
        self._born = self._first = self._last = now()
        self._num_tokens = 0
        self.gaps = [0] * NUM_GAPS  # histogram of the time between messages, per token
        metrics.num_waiting += 1

    def count(self, num_tokens: int) -> None:
        """Count new tokens."""
        if not num_tokens:
            return
        now = self._now()
        if self._num_tokens:
            self.gaps[self._all_gaps.observe((now - self._last) / num_tokens)] += 1
        else:
            self._first = now
            self._metrics.ttft.observe(now - self._born, self._exemplar)
            self._metrics.num_waiting -= 1
            self._metrics.num_running += 1
        self._num_tokens += num_tokens
        self._last = now
        self._metrics.tokens.value += num_tokens

    @property
    def itl_s(self) -> float | None:
        """Returns the mean time between tokens so far in seconds; None with fewer than two."""
        return (self._last - self._first) / (self._num_tokens - 1) if self._num_tokens > 1 else None

    def routed(self, seconds: float) -> None:
        """Note how long choosing workers took."""
        self._metrics.route_s.observe(seconds)

    def success(self, reason: str, prompt_tokens: int, cached_tokens: int, queued_s: float) -> None:
        """Count a successful choice. `queued_s`: how long it waited for its turn."""
        ended, whole_s = self._metrics.ended, self._now() - self._born
        ended.e2e.observe(whole_s, self._exemplar)
        ended.inference.observe(max(whole_s - queued_s, 0.0))
        ended.cached_tokens.inc(cached_tokens)
        ended.computed_length.observe(max(prompt_tokens - cached_tokens, 0))
        ended.prompt_tokens.inc(prompt_tokens)
        ended.prompt_length.observe(prompt_tokens)
        ended.generated.observe(self._num_tokens)
        if self._num_tokens:
            ended.prefill.observe(max(self._first - self._born - queued_s, 0.0))
            ended.decode.observe(self._last - self._first)
        if (itl_s := self.itl_s) is not None:
            ended.tpot.observe(itl_s)
        self._metrics.success(reason)

    def close(self) -> None:
        if self._num_tokens:
            self._metrics.num_running -= 1
        else:
            self._metrics.num_waiting -= 1


class _Ended:
    """Histograms that observe each successful choice, or each request, once."""

    def __init__(self, histogram: Callable[[str], BucketCounts], counter: Callable[[str], Count]) -> None:
        self.max_generated = histogram("vllm:request_max_num_generation_tokens")
        self.params_n = histogram("vllm:request_params_n")
        self.params_max_tokens = histogram("vllm:request_params_max_tokens")
        self.e2e = histogram("vllm:e2e_request_latency_seconds")
        self.inference = histogram("vllm:request_inference_time_seconds")
        self.prefill = histogram("vllm:request_prefill_time_seconds")
        self.decode = histogram("vllm:request_decode_time_seconds")
        self.tpot = histogram("vllm:request_time_per_output_token_seconds")
        self.prompt_length = histogram("vllm:request_prompt_tokens")
        self.computed_length = histogram("vllm:request_prefill_kv_computed_tokens")
        self.generated = histogram("vllm:request_generation_tokens")
        self.cached_tokens = counter("vllm:prompt_tokens_cached")
        self.prompt_tokens = counter("vllm:prompt_tokens")


class _SleepersCollector(Collector):
    def __init__(self, statuses: Callable[[], Iterable[ModelStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        awake, start = (GATEWAY[f"tandem_on_demand_{name}"].family() for name in ("awake", "start_seconds"))
        for status in self._statuses():
            awake.add_metric((status.name,), float(status.state is Wakefulness.AWAKE))
            start.add_metric((status.name,), status.start_s)
        yield from (awake, start)


class _UnreadableCollector(Collector):
    def __init__(self, found: Counter[str]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        family = GATEWAY["tandem_registry_unreadable_rows"].family()
        for kind, count in sorted(self._found.items()):
            family.add_metric((kind,), count)
        yield family


class _ReplicaCollector(Collector):
    def __init__(self, replica: BlockReplica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        replica = self._replica
        for name, value in (("blocks", len(replica)), ("dropped_blocks", replica.num_dropped),
                            ("rereads", replica.num_rereads)):  # fmt: skip
            family = GATEWAY[f"tandem_replica_{name}"].family()
            family.add_metric((), value)
            yield family
