"""`python -m benchmarks.replay`: Mooncake's trace, or another shape, through gateways to 8 + 8 null engines.

1 simulate   a router with perfect knowledge of the workers' caches, and all caches as one
2 replay     for each policy, on a fresh fleet: the whole trace at its arrival times, scaled
3 compare    prefix hit rate, tokens prefilled, TTFT, and the spread: the largest / mean of the tokens that workers of a
             role read, and wrote; benchmarks/out/replay.json keeps the last run of each policy
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet import MODEL, NullFleet, perfect_hit_rate, pooled_hit_rate, running, tokens_read, worker_tokens
from benchmarks.models import OUT
from benchmarks.results import earlier, percentile
from benchmarks.routing import POLICIES
from benchmarks.traffic import SCALE, SHAPES, Replayed, TraceRequest, read_trace, replay, shaped, tokens_of

RESULTS = OUT / "replay.json"
SPEEDUP = 24.0
SHAPE_REQUESTS = 300
# Host memory below each cache, where these are small: enough for all blocks of the trace.
KV_HOST = 256 << 20


def main() -> None:
    options = _options()
    requests = _requests(options)
    fleet = _fleet(options, requests)
    setting = {
        "shape": options.shape, "requests": len(requests), "scale": SCALE, "speedup": options.speedup,
        "per_second": options.per_second, "fleet": asdict(fleet),
    }  # fmt: skip
    bounds = {
        "perfect": perfect_hit_rate(
            requests, fleet.prefill, fleet.prefill_blocks, fleet.step_time.prefill_tokens_per_s
        ),
        "pooled": pooled_hit_rate(requests, fleet.prefill * fleet.prefill_blocks),
        "endless": pooled_hit_rate(requests, _footprint(requests)),
    }
    runs = earlier(RESULTS, setting, "policies")
    for policy in options.policies:
        runs[policy] = asyncio.run(_run(requests, replace(fleet, gateways=((policy, "require"),) * options.gateways)))
        RESULTS.write_text(
            json.dumps({"setting": setting, "bounds": bounds, "policies": runs}, indent=2), encoding="utf-8"
        )
    _print(requests, setting, bounds, runs)


def _fleet(options: argparse.Namespace, requests: Sequence[TraceRequest]) -> NullFleet:
    """Returns the fleet, with small caches and tiers below them if these are asked for."""
    fleet = NullFleet(gateways=(("tandem", "require"),) * options.gateways)
    if not options.cache_share:
        return fleet
    blocks = round(options.cache_share * _footprint(requests) / fleet.prefill)
    return replace(fleet, prefill_blocks=blocks, decode_blocks=blocks, kv_host=KV_HOST)


def _footprint(requests: Sequence[TraceRequest]) -> int:
    """Returns how many blocks all prompts have together."""
    return len({block for request in requests for block in request.full_blocks})


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    if options.shape == "mooncake":
        return read_trace(options.speedup, limit=options.requests)
    return shaped(options.shape, options.requests or SHAPE_REQUESTS, options.per_second)


async def _run(requests: Sequence[TraceRequest], fleet: NullFleet) -> dict[str, Any]:
    async with running(fleet) as addresses:
        replayed = await replay(requests, [address.grpc for address in addresses], MODEL)
    return figures(replayed, tokens_read("prefill")) | {
        "spread_read": spread(worker_tokens("prefill", "prefilled")),
        "spread_written": spread(worker_tokens("decode", "written")),
    }  # fmt: skip


def spread(tokens: Sequence[int]) -> float:
    """The largest share beside the mean: 1 where all are equal."""
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


def figures(replayed: Sequence[Replayed], prefilled_tokens: int) -> dict[str, Any]:
    """Figures of one replay in which the prefill workers computed so many prompt tokens."""
    answered = [one for one in replayed if one.answer]
    ttfts = [one.answer.ttft for one in answered if one.answer]
    prompt_tokens = tokens_of([one.request for one in answered])
    errors = Counter(one.error for one in replayed if one.error)
    return {
        "answered": len(answered),
        "errors": dict(errors.most_common(5)),
        "hit_rate": 1 - prefilled_tokens / prompt_tokens,
        "prefilled_tokens": prefilled_tokens,
        "ttft_p50_ms": 1000 * percentile(ttfts, 50),
        "ttft_p99_ms": 1000 * percentile(ttfts, 99),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__.splitlines()[0])
    compared = ["tandem", "round-robin", "random"]
    parser.add_argument("--policies", type=lambda text: text.split(","), default=compared, help=", ".join(POLICIES))
    parser.add_argument("--shape", default="mooncake", choices=["mooncake", *SHAPES])
    parser.add_argument("--speedup", type=float, default=SPEEDUP, help="the trace's arrival times are divided by this")
    parser.add_argument("--per-second", type=float, default=3.75, help="requests a second of other shapes")
    parser.add_argument("--requests", type=int, help=f"only the first so many (other shapes: {SHAPE_REQUESTS})")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument(
        "--cache-share", type=float, default=0.0,
        help="a role's caches together, as a part of all blocks of the prompts; host memory has the rest",
    )  # fmt: skip
    return parser.parse_args()


def _print(
    requests: Sequence[TraceRequest], setting: dict[str, Any], bounds: dict[str, float], runs: dict[str, dict[str, Any]]
) -> None:
    title = f"{setting['shape']}: {len(requests):,} requests, {tokens_of(requests):,} prompt tokens, "
    table = Table(
        "routing",
        "prefix hits",
        "of perfect",
        "tokens prefilled",
        "x Tandem's",
        "spread read, written",
        "TTFT p50, p99 ms",
        "answered",
    )
    for name, rate in bounds.items():
        table.add_row(f"{name} (simulated)", f"{100 * rate:.1f} %", _of(rate, bounds["perfect"]))
    for name, run in runs.items():
        own = runs.get("tandem", run)["prefilled_tokens"]
        table.add_row(
            name, f"{100 * run['hit_rate']:.1f} %", _of(run["hit_rate"], bounds["perfect"]),
            f"{run['prefilled_tokens']:,}", f"{run['prefilled_tokens'] / own:.2f}",
            f"{run['spread_read']:.2f}, {run['spread_written']:.2f}",
            f"{run['ttft_p50_ms']:.0f}, {run['ttft_p99_ms']:.0f}", f"{run['answered']:,}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(f"{title}{len(requests) / max(requests[-1].at, 1e-9):.1f} a second")
    console.print(table)
    for name, run in runs.items():
        for error, count in run["errors"].items():
            console.print(f"{name}: {count} x {error}", markup=False)


def _of(rate: float, perfect: float) -> str:
    return f"{rate / perfect:.3f}" if perfect > 0 else "-"


if __name__ == "__main__":
    main()
