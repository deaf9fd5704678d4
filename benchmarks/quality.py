"""Measures quantized weights and KV: perplexity on a text, and greedy tokens that stay.

`python -m benchmarks.quality` prints a table: of SmolLM2 on the prose of Python's manual; with `--model
models/demo/target` of the demo model on unseen code, whose figures tests/engine/test_quantization.py bounds.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tandem.checkpoints import as_folder, find_model
from tandem.engine.kv.kv_cache import row_size, write_kv
from tandem.engine.models import Decoder, Scope, read_model_config
from tandem.engine.weights.loader import load_weights

DEMO = Path(__file__).parents[1] / "models" / "demo" / "target"
LENGTH = 512


def held_out(model: Path, count: int) -> list[list[int]]:
    """Sequences of `LENGTH` + 1 tokens from test suites of the standard library, which training left out."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tests = sorted((Path(sysconfig.get_path("stdlib")) / "test").glob("test_*.py"))
    random.Random(0).shuffle(tests)
    return _sequences(tokenizer, (path.read_text(encoding="utf-8", errors="ignore") for path in tests), count)


def prose(model: Path, count: int) -> list[list[int]]:
    """As many sequences of Python's manual."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return _sequences(tokenizer, (topic for _, topic in sorted(topics.items())), count)


def _sequences(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> list[list[int]]:
    found: list[list[int]] = []
    for text in texts:
        ids: list[int] = tokenizer.encode(text[:8000]).ids
        if len(ids) > LENGTH:
            found.append(ids[: LENGTH + 1])
        if len(found) == count:
            return found
    raise ValueError(f"count: the standard library has no {count} texts as long as that")


def load(path: Path, quantization: str, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(read_model_config(path), dtype)
    load_weights(model, path)
    if quantization != "none":
        model.quantize(quantization)
    return model


def perplexity(model: Decoder, sequences: Sequence[Sequence[int]], kv: torch.dtype = torch.float32) -> float:
    total = 0.0
    for ids in sequences:
        logits = logits_of(model, ids[:-1], kv)
        total += float(F.cross_entropy(logits, torch.tensor(ids[1:])))
    return math.exp(total / len(sequences))


def agreement(
    model: Decoder, other: Decoder, sequences: Sequence[Sequence[int]], kv: torch.dtype = torch.float32
) -> float:
    """The share of positions at which `model` with such KV and `other` with plain KV would say the same."""
    pairs = ((logits_of(model, ids, kv).argmax(-1), logits_of(other, ids).argmax(-1)) for ids in sequences)
    return float(torch.stack([(ours == theirs).float().mean() for ours, theirs in pairs]).mean())


@torch.inference_mode()
def logits_of(model: Decoder, ids: Sequence[int], kv: torch.dtype = torch.float32) -> Tensor:
    """Logits at every position, with K and V held in `kv`."""
    slots = torch.arange(len(ids))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        _, heads, dim = k.shape
        k, v = write_kv(torch.empty(1, 2, heads, len(ids), row_size(kv, dim), dtype=kv), slots, k, v)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return model.logits(model(torch.tensor(ids), slots, attend))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=16)
    arguments = parser.parse_args()
    model_path = as_folder(find_model(arguments.model).path)
    texts = held_out if model_path.resolve() == DEMO else prose
    sequences, plain = texts(model_path, arguments.sequences), load(model_path, "none")
    base = perplexity(plain, sequences)
    print("| weights | KV | perplexity | beside plain | same greedy token |\n|---|---|---|---|---|")
    print(f"| none | float32 | {base:.3f} | | |")
    for quantization, kv in (("none", "int8"), ("int8", "float32"), ("int4", "float32"), ("int8", "int8")):
        model, held = load(model_path, quantization), getattr(torch, kv)
        found = perplexity(model, sequences, held)
        same = agreement(model, plain, sequences, held)
        print(f"| {quantization} | {kv} | {found:.3f} | {found / base - 1:+.2%} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
