"""What Prometheus reads. Names and meanings are vLLM's where vLLM has them, so that its dashboards work.

queued    accepted, not let into the cluster yet
waiting   accepted, no token yet: queued ones too        running   from the first token to the last
fallback  a choice that did not take the path it should: no pair could take it, Redis was gone, or its worker died
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from services.gateway.admission import Admission, PriorityClass
from tandem.registry import BlockReplica, Role, Worker
from tandem.v1 import llm_pb2

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name",)
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
REFUSED = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PATHS = {llm_pb2.Path.KIND_REMOTE_PREFILL: "remote", llm_pb2.Path.KIND_LOCAL_PREFILL: "local"}


class Metrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, LABELS, registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, registry=registry, buckets=buckets).labels(model)

        self.num_waiting = self.num_running = 0
        waiting = gauge("vllm:num_requests_waiting", "Choices accepted that have no token yet.")
        waiting.set_function(lambda: self.num_waiting)
        running = gauge("vllm:num_requests_running", "Choices that are being written.")
        running.set_function(lambda: self.num_running)
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", E2E)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered choices.")
        self.written = _Written(model)
        registry.register(self.written)
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked for in prefix caches.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self.proposed_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed ahead.")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were right.")
        success = Counter(
            "vllm:request_success", "Choices that ended well.", (*LABELS, "finished_reason"), registry=registry
        )
        requests = Counter(
            "tandem_requests", "Requests by path and HTTP status.", ("path", "status"), registry=registry
        )
        transfer_bytes = Counter(
            "tandem_kv_transfer_bytes", "KV bytes moved for requests.", ("transport",), registry=registry
        )
        self._fallbacks = Counter(
            "tandem_fallbacks", "Choices that did not take the path they should.", ("path", "reason"), registry=registry
        )
        self.migrations = counter("tandem_migrations", "Times that a choice went on on other workers.")
        queued = Histogram(
            "vllm:request_queue_time_seconds", "Waited for a turn at the gateway.", (*LABELS, "priority_class"),
            registry=registry, buckets=QUEUE,
        )  # fmt: skip
        self._refused = histogram(
            "tandem_refused_after_seconds", "From a request's arrival to its 429, inside the gateway.", REFUSED
        )
        self._model = model
        # Looked up once for each value of a label, not for each request.
        self._success = cache(lambda reason: success.labels(model, reason))
        self._requests = cache(lambda path, status: requests.labels(path, str(status)))
        self._transfer_bytes = cache(transfer_bytes.labels)
        self._queued = cache(lambda kind: queued.labels(model, kind.label))

    def choice(self, now: Callable[[], float]) -> Meter:
        """Of one choice that is accepted now."""
        return Meter(self, now)

    def success(self, reason: str) -> None:
        self._success(reason).inc()

    def request(self, path: str, status: int) -> None:
        """One request has ended; 499 is a client that left."""
        self._requests(path, status).inc()

    def refused(self, seconds: float) -> None:
        """One request got a 429, so long after it had arrived."""
        self._refused.observe(seconds)

    def queued(self, kind: PriorityClass, seconds: float) -> None:
        self._queued(kind).observe(seconds)

    def path(self, path: llm_pb2.Path, fallback: str) -> None:
        """The path one choice took, and why it is not the one it should be; empty where it is."""
        if path.transport:
            self._transfer_bytes(path.transport).inc(path.transfer_bytes)
        if fallback:
            self._fallbacks.labels(PATHS[path.kind], fallback).inc()

    def watch(self, admission: Admission) -> None:
        """Report who waits and who is inside, as of when Prometheus asks."""
        queued = Gauge(
            "tandem_num_requests_queued", "Choices waiting for their turn.", (*LABELS, "priority_class"),
            registry=self._registry,
        )  # fmt: skip
        for kind in PriorityClass:
            queued.labels(self._model, kind.label).set_function(partial(admission.num_waiting, kind))
        for name, text, count in (
            ("tandem_admitted_requests", "Choices let into the cluster.", lambda: len(admission.admitted)),
            ("tandem_admitted_tokens", "Their prompts and all they may write.", lambda: admission.admitted.tokens),
        ):
            Gauge(name, text, LABELS, registry=self._registry).labels(self._model).set_function(count)

    def watch_workers(self, workers: Callable[[], Sequence[Worker]]) -> None:
        """Report how full the decode workers' KV caches are, as last seen."""

        def used() -> float:
            decodes = [worker for worker in workers() if worker.info.role is Role.DECODE]
            blocks = sum(worker.info.num_blocks for worker in decodes)
            return 1 - sum(worker.load.free_blocks for worker in decodes) / blocks if blocks else 0.0

        text = "KV blocks of the decode workers that sequences hold; 1 is all."
        Gauge("vllm:kv_cache_usage_perc", text, LABELS, registry=self._registry).labels(self._model).set_function(used)

    def watch_replica(self, replica: BlockReplica) -> None:
        """Report what is known of prefix caches, as of when Prometheus asks."""
        self._registry.register(_ReplicaCollector(replica))

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class Meter:
    """One choice, from waiting to running to its end. `close` it."""

    def __init__(self, metrics: Metrics, now: Callable[[], float]) -> None:
        self._metrics, self._written = metrics, metrics.written
        self._now = now
        self._born = self._last = now()
        self._num_tokens = 0
        metrics.num_waiting += 1

    def count(self, num_tokens: int) -> None:
        """So many new tokens."""
        if not num_tokens:
            return
        now = self._now()
        if self._num_tokens:
            self._written.between((now - self._last) / num_tokens)
        else:
            self._metrics.ttft.observe(now - self._born)
            self._metrics.num_waiting -= 1
            self._metrics.num_running += 1
        self._num_tokens += num_tokens
        self._last = now
        self._written.num_tokens += num_tokens

    def success(self, reason: str, prompt_tokens: int) -> None:
        self._metrics.e2e.observe(self._now() - self._born)
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.success(reason)

    def close(self) -> None:
        if self._num_tokens:
            self._metrics.num_running -= 1
        else:
            self._metrics.num_waiting -= 1


class _Written(Collector):
    """Tokens and the times between them. Counted by one thread, without the locks of prometheus_client's own."""

    def __init__(self, model: str) -> None:
        self._labels = (model,)
        self.num_tokens = 0
        self._seconds = 0.0
        self._counts = [0] * (len(ITL) + 1)

    def between(self, seconds: float) -> None:
        self._seconds += seconds
        self._counts[bisect_left(ITL, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens written.", labels=LABELS)
        tokens.add_metric(self._labels, self.num_tokens)
        yield tokens
        text = "Between messages of one choice, per token."
        itl = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=LABELS)
        buckets = zip((*map(str, ITL), "+Inf"), accumulate(self._counts), strict=True)
        itl.add_metric(self._labels, list(buckets), self._seconds)
        yield itl


class _ReplicaCollector(Collector):
    def __init__(self, replica: BlockReplica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        replica = self._replica
        yield GaugeMetricFamily("tandem_replica_blocks", "KV blocks whose holders are known.", value=len(replica))
        for name, text, value in (
            ("dropped_blocks", "KV blocks forgotten because more were reported than fit.", replica.num_dropped),
            ("rereads", "Workers whose blocks were read anew, whole.", replica.num_rereads),
        ):
            yield CounterMetricFamily(f"tandem_replica_{name}", text, value=value)
