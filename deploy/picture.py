"""The picture in docs/architecture.md: what runs, and what goes between. Written as SVG by `make docs`.

It has no background of its own, and its colours follow what the reader's system prefers, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

SIZE = 980, 620
LINE = 19
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .path, .note { font-size: 12.5px; fill: #59636e; }
  .path { font-family: ui-monospace, monospace; }
  .title { font-weight: 600; }
  .step { font-weight: 600; fill: #0969da; }
  rect { fill: #f6f8fa; stroke: #818b98; }
  path { fill: none; stroke: #59636e; stroke-width: 1.5; marker-end: url(#head); }
  path.kv { stroke: #0969da; stroke-width: 5; marker-end: url(#kv-head); }
  #head path, #kv-head path { marker-end: none; stroke: none; fill: #59636e; }
  #kv-head path { fill: #0969da; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .path, .note { fill: #9198a1; }
    .step { fill: #4493f8; }
    rect { fill: #151b23; stroke: #656c76; }
    path { stroke: #9198a1; }
    path.kv { stroke: #4493f8; }
    #head path { fill: #9198a1; }
    #kv-head path { fill: #4493f8; }
  }
"""


def architecture() -> str:
    width, height = SIZE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{_LABEL}">',
        f"<style>{STYLE}</style>",
        "<defs>",
        _head("head", 9),
        _head("kv-head", 18),
        "</defs>",
        *_boxes(),
        *_arrows(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


_LABEL = "Clients, the gateway, prefill and decode workers, the kvstore with Redis, and what goes between them"


def _boxes() -> Iterator[str]:
    yield from _box((20, 200, 120, 110), "clients", "", ("OpenAI's HTTP", "Tandem's gRPC"))
    yield from _box(
        (215, 90, 270, 320), "gateway", "services/gateway/",
        (
            "door/ with apis/, grpc/: two doors",
            "text/: template, tokenizer, and back",
            "admission/: whose turn it is",
            "routing/: which pair of workers",
            "generation/: attempts, going on",
            "   elsewhere, stop strings, tools",
            "workers/: one stream to each",
            "",
            "text exists only here; no torch",
        ),
    )  # fmt: skip
    worker = ("tandem/worker/: lease, streams", "tandem/engine/: scheduler, blocks, model")
    sends, lands = "tandem/transfer/: sends KV", "tandem/transfer/: lands KV"
    yield from _box((680, 60, 290, 130), "prefill workers", "services/prefill/", (*worker, sends))
    yield from _box((680, 330, 290, 130), "decode workers", "services/decode/", (*worker, lands))
    yield from _box(
        (215, 500, 270, 100), "registry", "services/kvstore/",
        ("Redis, through tandem/registry/: leases,", "   load, promises, who holds which block"),
    )  # fmt: skip


def _arrows() -> Iterator[str]:
    yield from _arrow("M140 235 H211", (147, 227), "", "request")
    yield from _arrow("M215 275 H144", (153, 293), "", "tokens")
    yield from _arrow("M485 115 H676", (495, 107), "3", "prefill, with the ticket")
    yield from _arrow("M680 160 H489", (495, 178), "4", "first token")
    yield from _arrow("M485 345 H676", (495, 337), "2", "reserve blocks")
    yield from _arrow("M680 368 H489", (512, 386), "", "landing ticket")
    yield from _arrow("M680 405 H489", (495, 423), "5", "tokens of a step or a few")
    yield from _arrow("M825 190 V318", (666, 248), "3", "KV blocks, layer by", kind="kv")
    yield _text((683, 267), "note", "layer, checksummed")
    yield from _arrow("M320 410 V496", (330, 448), "1", "choose a pair, reserve on both:")
    yield _text((347, 467), "note", "one Lua call;")
    yield _text((434, 467), "step", "6")
    yield _text((450, 467), "note", "release")
    yield from _arrow("M825 460 V550 H489", (520, 543), "", "from every worker: leases, load, cached blocks")


def _box(place: tuple[int, int, int, int], title: str, path: str, lines: tuple[str, ...]) -> Iterator[str]:
    x, y, width, height = place
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    yield _text((x + 14, y + 26), "title", title)
    if path:
        yield _text((x + width - 14, y + 26), "path", path, anchor="end")
    for number, line in enumerate(lines):
        yield _text((x + 14 + 6 * (len(line) - len(line.lstrip())), y + 54 + LINE * number), "note", line.strip())


def _arrow(path: str, at: tuple[int, int], step: str, label: str, kind: str = "plain") -> Iterator[str]:
    x, y = at
    yield f'<path d="{path}" class="{kind}"/>'
    if step:
        yield _text((x, y), "step", step)
    yield _text((x + (17 if step else 0), y), "note", label)


def _text(at: tuple[int, int], kind: str, text: str, anchor: str = "start") -> str:
    x, y = at
    end = ' text-anchor="end"' if anchor == "end" else ""
    return f'<text x="{x}" y="{y}" class="{kind}"{end}>{escape(text, quote=False)}</text>'


def _head(name: str, size: int) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="{size}" markerHeight="{size}" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 Z"/></marker>'
    )
