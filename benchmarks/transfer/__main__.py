"""Measures KV transfer: its bandwidth beside memcpy's, and how much of it hides behind prefill.

1. bandwidth   for shm and tcp: two processes, much KV, in pushes of one layer of 512 tokens (a chunk) and of 2,048,
               of blocks in runs and of blocks that lie scattered
2. overlap     for shm and tcp: gateway, prefill and decode worker, prompts of 2,048 tokens; the trace says the rest
3. write all of it as JSON; print it beside its bounds
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.models import LARGE, OUT
from benchmarks.transfer.bandwidth import BLOCK_SIZE, ORDERS, Bandwidth, bandwidth
from benchmarks.transfer.overlap import Overlap, overlap

RESULTS = OUT / "transfer.json"
TRANSPORTS = ("shm", "tcp")
CHUNK_TOKENS, PROMPT_TOKENS = 512, 2048


def main() -> None:
    console, options = Console(soft_wrap=True), _options()
    torch.set_num_threads(1)
    found: list[dict[str, object]] = []
    for transport in options.transports:
        for tokens, order in product((CHUNK_TOKENS, PROMPT_TOKENS), ORDERS):
            moved = _bandwidth(transport, order, tokens, options)
            console.print(said_bandwidth(moved), markup=False)
            found.append(asdict(moved) | {"ratio": moved.ratio})
        if options.overlap:
            hidden = overlap(LARGE, transport, prompt_tokens=PROMPT_TOKENS, rounds=options.rounds)
            console.print(said_overlap(moved, hidden), markup=False)
            found.append(asdict(hidden) | {"layer_s": moved.layer_s, "bound_s": hidden.bound_s(moved.layer_s)})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console.print(f"written to {options.out}", markup=False)


def _bandwidth(transport: str, order: str, push_tokens: int, options: argparse.Namespace) -> Bandwidth:
    return bandwidth(
        LARGE, transport, order, num_bytes=options.mib << 20, push_tokens=push_tokens,
        layer_blocks=PROMPT_TOKENS // BLOCK_SIZE, rounds=options.rounds,
    )  # fmt: skip


def said_bandwidth(moved: Bandwidth) -> str:
    return (
        f"{moved.transport}, pushes of {moved.push_tokens:,} tokens, blocks {moved.order}: {moved.gb_s:.2f} GB/s, "
        f"checksums included; memcpy {moved.memcpy_gb_s:.2f} GB/s; ratio {moved.ratio:.2f}"
    )


def said_overlap(moved: Bandwidth, hidden: Overlap) -> str:
    bound = hidden.bound_s(moved.layer_s)
    return (
        f"{hidden.transport}: prefill {hidden.prefill_s * 1e3:,.0f} ms, one layer's push {moved.layer_s * 1e3:.2f} ms, "
        f"exposed {hidden.exposed_s * 1e3:.2f} ms (from the last layer's KV on {hidden.tail_s * 1e3:.1f} ms), bound "
        f"{bound * 1e3:.1f} ms; the engine spent {hidden.push_s * 1e3:.1f} ms in pushes; "
        f"{hidden.overlap_ratio:.2%} of the transfer ran beneath computing"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=258, help="KV to move for the bandwidth, in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", help="the bandwidth alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
