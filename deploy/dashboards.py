"""`python -m deploy.dashboards`: Grafana's dashboards, written to deploy/helm/dashboards/. `make docs` calls it.

A panel's queries return something on any cluster that has served a request, so an empty panel is a fault: what is
counted only when it goes wrong is `or vector(0)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos

FOLDER = Path(__file__).parent / "helm" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT, ACROSS = 8, 8, 3
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Plot:
    """One panel. `queries`: PromQL by the legend of its lines."""

    title: str
    unit: str
    queries: Mapping[str, str]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard, its charts by row."""

    title: str
    uid: str
    rows: Mapping[str, Sequence[Plot]] = field(default_factory=dict)


def rate(name: str, by: str = "", among: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{{{among}}}[{RATE}]))" if among else f"sum{grouped} (rate({name}[{RATE}]))"


def failures(name: str, by: str) -> dict[str, str]:
    return {f"{{{{{by.split(', ')[-1]}}}}}": f"{rate(name, by)} or vector(0)"}


def quantiles(name: str, by: str = "") -> dict[str, str]:
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return {f"p{q}{legend}": f"histogram_quantile(0.{q}, {rate(f'{name}_bucket', labels)})" for q in (50, 95, 99)}


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


SLO = "model_name, priority_class"
SERVICE = Board(
    "Tandem: service",
    "tandem-service",
    {
        "Targets": (
            Plot(
                "Attainment",
                "percentunit",
                {
                    "{{priority_class}}": share(
                        rate("tandem_slo_requests_total", SLO, 'outcome="met"'), rate("tandem_slo_requests_total", SLO)
                    ),
                },
                "Share of requests that met their class's targets. See docs/slo.md.",
            ),
            Plot(
                "Requests by outcome",
                "reqps",
                {
                    "{{priority_class}} {{outcome}}": rate("tandem_slo_requests_total", "priority_class, outcome"),
                },
            ),
            Plot(
                "Goodput",
                "none",
                {"{{priority_class}}": rate("tandem_goodput_tokens_total", "priority_class")},
                "Tokens a second of requests that met their targets.",
            ),
        ),
        "Latency": (
            Plot("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
            Plot("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
            Plot("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
            Plot("Waiting for a turn", "s", quantiles("vllm:request_queue_time_seconds", "priority_class")),
            Plot("Prefill: route to first token", "s", quantiles("vllm:request_prefill_time_seconds")),
            Plot("Choosing workers", "s", quantiles("tandem_route_seconds")),
        ),
        "Load": (
            Plot("Requests", "reqps", {"{{path}} {{status}}": rate("tandem_requests_total", "path, status")}),
            Plot(
                "Tokens",
                "none",
                {
                    "prompt": rate("vllm:prompt_tokens_total"),
                    "generated": rate("vllm:generation_tokens_total"),
                },
                "A second.",
            ),
            Plot("Queued", "none", {"{{priority_class}}": "sum by (priority_class) (tandem_num_requests_queued)"}),
            Plot(
                "Waiting and running",
                "none",
                {
                    "waiting": "sum(vllm:num_requests_waiting)",
                    "running": "sum(vllm:num_requests_running)",
                },
            ),
            Plot(
                "Found in prefix caches",
                "percentunit",
                {
                    "share": share(rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")),
                },
                "Share of prompt tokens.",
            ),
            Plot("Tenants", "none", {"{{tenant}}": rate("tandem_tenant_tokens_total", "tenant")}, "Tokens a second."),
        ),
        "What goes wrong": (
            Plot("Errors", "reqps", failures("tandem_errors_total", "status, reason"), "By code, refusals too."),
            Plot("Fallbacks", "ops", failures("tandem_fallbacks_total", "reason")),
            Plot("Migrations", "ops", {"migrations": rate("tandem_migrations_total")}),
        ),
        "Cost": (
            Plot(
                "An hour",
                "none",
                {
                    "{{role}}": "max by (role) (tandem_live_workers * tandem_price_per_worker_hour)",
                },
                "Of the live workers, by --worker-hour-prices.",
            ),
            Plot("Live workers", "none", {"{{role}}": "max by (role) (tandem_live_workers)"}),
            Plot("Worker starts", "none", {"{{role}}": "max by (role) (increase(tandem_worker_starts_total[15m]))"}),
        ),
    },
)
WORKERS = Board(
    "Tandem: workers",
    "tandem-workers",
    {
        "Engines": (
            Plot("KV blocks in use", "percentunit", {"{{worker}}": "max by (worker) (tandem_kv_usage)"}),
            Plot("Prompt tokens to compute", "none", {"{{worker}}": "max by (worker) (tandem_queued_tokens)"}),
            Plot("Sequences", "none", {"{{worker}}": "max by (worker) (tandem_running_sequences)"}),
            Plot("Tokens", "none", {
                "{{worker}} prompt": rate("tandem_read_tokens_total", "worker"),
                "{{worker}} decoded": rate("tandem_written_tokens_total", "worker"),
            }, "A second."),
            Plot("Tokens of a step", "none", quantiles("vllm:iteration_tokens_total", "worker")),
            Plot("Sequences of a step", "none", quantiles("tandem_batch_sequences", "worker")),
            Plot("Preemptions and evictions", "ops", {
                "{{worker}} preempted": rate("vllm:num_preemptions_total", "worker"),
                "{{worker}} blocks evicted": rate("tandem_evicted_blocks_total", "worker"),
            }),
            Plot("KV tiers", "ops", {
                "{{worker}} written to {{tier}}": rate("tandem_kv_tier_written_blocks_total", "worker, tier"),
                "{{worker}} restored from {{tier}}": rate("tandem_kv_tier_restored_blocks_total", "worker, tier"),
            }, "Blocks, where prefill workers have `kv_host` or `kv_disk`."),
            Plot("Engine time", "percentunit", {
                "{{worker}} steps": rate("tandem_step_seconds_total", "worker"),
                "{{worker}} kept by moving blocks": rate("tandem_moving_seconds_total", "worker"),
            }, "The second: while blocks were taken for tiers or other workers."),
            Plot("KV tiers, read of what is written", "percentunit", {"{{worker}} {{tier}}": share(
                "sum by (worker, tier) (increase(tandem_kv_tier_restored_blocks_total[6h]))",
                "sum by (worker, tier) (increase(tandem_kv_tier_written_blocks_total[6h]))",
            )}, "Of six hours, as its alert sees it."),
            Plot("Aborts", "ops", {
                "{{worker}}": rate("tandem_aborted_sequences_total", "worker"),
                "{{worker}} blocks freed": rate("tandem_aborted_blocks_total", "worker"),
            }),
            Plot("Adapters", "none", {"{{worker}}": "max by (worker) (tandem_adapters)"}, "In memory."),
        ),
        "KV transfer": (
            Plot("Bytes", "Bps", {"{{worker}} to {{peer}}, {{transport}}":
                                   rate("tandem_transfer_bytes_total", "worker, peer, transport")}),
            Plot("Seconds", "s", quantiles("tandem_transfer_seconds", "transport"),
                  "From the first layer pushed to the last frame verified; computing runs beside it."),
            Plot("Exposed", "s", quantiles("tandem_transfer_exposed_seconds", "transport"),
                  "What of it nothing computes beside."),
            Plot("Links", "none", {"{{worker}} to {{peer}}": "min by (worker, peer) (tandem_link_up)"}, "1 is up."),
            Plot("Failures", "ops", failures("tandem_transfer_failures_total", "worker, peer, code")),
        ),
        "Registry": (
            Plot("Reached", "none", {
                "by gateways": "min(tandem_registry_reached)", "by the kvstore": "min(tandem_registry_up)",
            }),
            Plot("Sweeps", "s", quantiles("tandem_sweep_seconds")),
            Plot("Known", "none", {
                "workers": "max(tandem_registry_workers)", "reservations": "max(tandem_registry_reservations)",
            }),
            Plot("Past their time", "ops", {"{{kind}}": rate("tandem_registry_expired_total", "kind")}),
            Plot("Blocks with known holders", "none", {"{{instance}}": "max by (instance) (tandem_replica_blocks)"}),
        ),
    },
)  # fmt: skip
PAGES = (SERVICE, WORKERS)


def panel(chart: Plot, place: int, top: int) -> Panel:
    at = GridPos(h=HEIGHT, w=WIDTH, x=place % ACROSS * WIDTH, y=top + place // ACROSS * HEIGHT)
    made = Panel().title(chart.title).description(chart.text).unit(chart.unit).datasource(SOURCE).grid_pos(at)
    for letter, (legend, query) in zip("ABCDEF", chart.queries.items(), strict=False):
        made.with_target(Dataquery().expr(query).legend_format(legend).ref_id(letter).exemplar(True))
    return made


def written(page: Board) -> str:
    made = Dashboard(page.title).uid(page.uid).tags(["tandem"]).refresh("30s").time("now-1h", "now")
    made.with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    top = 0
    for title, charts in page.rows.items():
        made.with_row(Row(title).grid_pos(GridPos(h=1, w=WIDTH * ACROSS, x=0, y=top)))
        for place, chart in enumerate(charts):
            made.with_panel(panel(chart, place, top + 1))
        top += 1 + -(-len(charts) // ACROSS) * HEIGHT
    text: str = JSONEncoder(sort_keys=True, indent=1).encode(made.build())
    return text + "\n"


def documents() -> dict[Path, str]:
    return {FOLDER / f"{page.uid}.json": written(page) for page in PAGES}


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
