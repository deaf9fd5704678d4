"""Draws benchmarks/out/serving.json as one PNG: a panel for each workload's first metrics, a bar for each peer.

Bars are medians, their whiskers the fastest and slowest round; where a floor of the machine bounds a metric, it is a
dashed line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.models import LARGE
from benchmarks.serving import RESULTS, digits

COLUMNS = 4
COLOURS = {
    "tandem-1p1d": "#d1495b", "tandem": "#edae49", "vllm": "#30638e", "vllm-256": "#7ea6c8", "transformers": "#9aa0a6",
}  # fmt: skip
OTHERS = ("#66a182", "#8d6a9f", "#5f5449")
# The metrics worth a panel: (workload, metric) and what the panel is called.
PANELS = {
    ("single", "decode"): "Single stream",
    ("phase", "decode"): "Decode phase of 16 sequences",
    ("concurrent", "output"): "16 concurrent, 256 in + 64 out",
    ("prefill", "prefill"): "Prefill of 1,024 tokens",
    ("prefix", "wall"): "16 requests, shared prefix of 1,024",
    ("cached", "gain"): "TTFT gained by 500 cached of 550 tokens",
    ("disturbed", "itl p99"): "4 decodes beside prompts of 1,024",
    ("disturbed", "ttft"): "The prompts beside 4 decodes",
    ("disturbed", "goodput"): "TTFT ≤ 8 s and every ITL ≤ 150 ms",
    ("streams", "output"): "14.7 M model, 64 streams",
    ("batching", "continuous"): "14.7 M model, Azure trace",
    ("batching", "gain"): "Continuous against static batching",
}


def draw(found: dict[str, Any], path: Path) -> None:
    """
    Args:
        found: what `benchmarks.serving` wrote.
        path: of the PNG.
    """
    panels = _panels(found)
    rows = math.ceil(len(panels) / COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(16, 3.3 * rows + 1.2), squeeze=False, layout="constrained")
    colours = _colours(found["peers"])
    for place, panel in zip(axes.flat, panels, strict=False):
        _panel(place, *panel, colours, _floor(found["floors"], panel[0]["name"], panel[1]["name"]))
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    shown = [name for name in found["peers"] if any(name in workload["results"] for workload, _ in panels)]
    handles = [Patch(color=colours[name]) for name in shown]
    figure.legend(handles, [found["peers"][name] for name in shown], loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle("Tandem and its peers: same machine, same run, same weights", fontsize=15, fontweight="bold")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panels(found: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    metrics = {(w["name"], m["name"]): (w, m) for w in found["workloads"] if w["results"] for m in w["metrics"]}
    return [metrics[key] for key in PANELS if key in metrics]


def _panel(
    place: Axes, workload: dict[str, Any], metric: dict[str, str], colours: dict[str, str], floor: float | None
) -> None:
    results = {peer: figures[metric["name"]] for peer, figures in workload["results"].items()}
    medians = [one["median"] for one in results.values()]
    bars = place.bar(range(len(results)), medians, color=[colours[peer] for peer in results])
    for x, one in enumerate(results.values()):
        place.vlines(x, min(one["rounds"]), max(one["rounds"]), color="#333333", linewidth=1)
    place.bar_label(bars, [f"{value:,.{digits(value)}f}" for value in medians], padding=4, fontsize=10)
    if floor is not None:
        place.axhline(floor, color="#333333", linestyle="--", linewidth=1, label=f"floor {floor:,.0f}")
        place.legend(frameon=False, fontsize=8, loc="upper right")
    place.set_title(PANELS[workload["name"], metric["name"]], fontsize=10, fontweight="bold", loc="left")
    place.set_ylabel(f"{metric['name']}, {metric['unit']} ({metric['better']} is better)", fontsize=8)
    place.set_xticks([])
    place.margins(y=0.22)
    place.set_ylim(bottom=0, top=110 if metric["unit"] == "%" else None)
    place.spines[["top", "right"]].set_visible(False)


def _floor(floors: dict[str, float], workload: str, metric: str) -> float | None:
    """Tokens per second at which the large model's weights are read once a token, or its GEMMs fill the arithmetic."""
    if (workload, metric) == ("single", "decode"):
        return max(floors["read_gb_s"], floors["read_gb_s_one"]) * 1e9 / (2 * LARGE.parameters)
    if (workload, metric) == ("prefill", "prefill"):
        return max(floors["gemm_gflop_s"], floors["gemm_gflop_s_one"]) * 1e9 / (2 * LARGE.block_parameters)
    return None


def _colours(peers: Sequence[str]) -> dict[str, str]:
    others = iter(OTHERS * len(peers))
    return {name: COLOURS.get(name) or next(others) for name in peers}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description="Draws the last results as PNG.")
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    options = parser.parse_args()
    if not options.results.is_file():
        parser.error(f"{options.results} is missing: python -m benchmarks.serving writes it")
    path = options.results.with_suffix(".png")
    draw(json.loads(options.results.read_text(encoding="utf-8")), path)
    print(path)


if __name__ == "__main__":
    main()
