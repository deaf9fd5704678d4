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
# The metrics worth a panel: (workload, metric).
PANELS = (
    ("single", "decode"), ("concurrent", "output"), ("concurrent", "decode phase"), ("prefill", "prefill"),
    ("prefix", "wall"), ("disturbed", "itl p99"), ("disturbed", "ttft"), ("disturbed", "goodput"),
    ("streams", "output"), ("batching", "continuous"), ("batching", "static"), ("batching", "gain"),
)  # fmt: skip


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
    below = [one["median"] - min(one["rounds"]) for one in results.values()]
    above = [max(one["rounds"]) - one["median"] for one in results.values()]
    style = {"ecolor": "#555555", "elinewidth": 1, "capsize": 3}
    bars = place.bar(
        range(len(results)), medians, color=[colours[p] for p in results], yerr=(below, above), error_kw=style
    )
    labels = [f"{value:,.{digits(value)}f}" for value in medians]
    place.bar_label(bars, labels, padding=3, fontsize=10)
    if floor is not None:
        place.axhline(floor, color="#333333", linestyle="--", linewidth=1, label=f"floor {floor:,.0f}")
        place.legend(frameon=False, fontsize=8, loc="upper right")
    place.set_title(f"{_short(workload['title'])}\n{metric['name']}, {metric['unit']} ({metric['better']} is better)",
                    fontsize=9, loc="left")  # fmt: skip
    place.set_xticks([])
    place.margins(y=0.22)
    place.set_ylim(bottom=0)
    place.spines[["top", "right"]].set_visible(False)


def _short(title: str, width: int = 48) -> str:
    return title if len(title) <= width else title[: width - 1].rstrip(" ,") + "…"


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
    draw(json.loads(options.results.read_text()), path)
    print(path)


if __name__ == "__main__":
    main()
