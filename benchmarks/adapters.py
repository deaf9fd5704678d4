"""What LoRA adapters cost: a decode step of many sequences, each with an adapter of its own, beside one without any.

`python -m benchmarks.adapters` makes the 387 M model and `--registered` adapters of rank 8 for all linear layers, of
which only the scale differs beyond the first `--files`, loads all of them and decodes with the last `--live` ones. One
thread computes, its own CPU time counts; all kinds of step take turns, and the best of each is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.models import LARGE, made
from benchmarks.quantization import prompt_of, timed
from tandem.adapters import AdapterRef
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.engine.lora import shapes_of
from tandem.engine.models import read_model_config

BLOCKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn")


def save_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    config, generator = read_model_config(model), torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for name, (outputs, inputs) in shapes_of(config).items():
            module = f"base_model.model.model.layers.{layer}.{BLOCKS.get(name, 'mlp')}.{name}"
            for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                drawn = 0.02 * torch.randn(shape, generator=generator)
                tensors[f"{module}.lora_{end}.weight"] = drawn.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config_json = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank + seed / 1000, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config_json))


def register(directory: Path, model: Path, count: int, files: int, rank: int) -> None:
    """`count` folders; all have a scale, and so a revision, of their own."""
    for i in range(count):
        folder = directory / f"a{i}"
        if i < files:
            save_adapter(folder, model, rank, i)
            continue
        folder.mkdir()
        os.link(directory / f"a{i % files}" / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank + i / 1000, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(said))


def start(engine: Engine, refs: list[AdapterRef | None], steps: int) -> None:
    assert engine.adapters is not None
    for i, ref in enumerate(refs):
        request = Request(f"r{i}", prompt_of(8, i), SamplingParams(max_tokens=steps + 2, temperature=0.0), lora=ref)
        request.adapter = engine.adapters.get(ref) if ref else None
        engine.add(request)
    while engine.stats().queued_tokens:
        engine.step()


def step_s(engine: Engine, refs: list[AdapterRef | None], steps: int) -> float:
    start(engine, refs, steps)
    best = min(timed(engine) for _ in range(steps))
    for i in range(len(refs)):
        engine.abort(f"r{i}")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("registered", 1000), ("live", 64), ("rank", 8), ("files", 64), ("turns", 3), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    model = made(LARGE)
    with tempfile.TemporaryDirectory() as place:
        register(Path(place), model, asked.registered, asked.files, asked.rank)
        engine = Engine(
            EngineConfig(
                model_path=model, model_name="model", dtype="bfloat16", num_threads=1, num_blocks=512,
                enable_prefix_caching=False, lora_dir=Path(place), lora_memory=2 << 30,
            )
        )  # fmt: skip
        assert engine.adapters is not None
        started = time.monotonic()
        refs = [engine.adapters.read(f"a{i}", f"a{i}") for i in range(asked.registered)]
        each = (time.monotonic() - started) / len(refs)
        print(f"{len(refs)} adapters registered, {each * 1000:.0f} ms each; {len(engine.adapters.held())} in memory")
        print(f"| {LARGE.name}, rank {asked.rank}, ms of CPU, one thread | none | one for all | one each |")
        print("|---|---|---|---|")
        for live in sorted({1, 16, asked.live}):
            kinds: list[list[AdapterRef | None]] = [[None] * live, [refs[0]] * live, [*refs[-live:]]]
            times = [min(turn) for turn in zip(*_turns(engine, kinds, asked.turns, asked.steps), strict=True)]
            cells = (f"{seconds * 1000:.1f} ({seconds / times[0]:.2f}x)" for seconds in times)
            print(f"| a step of {live} | " + " | ".join(cells) + " |", flush=True)


def _turns(engine: Engine, kinds: list[list[AdapterRef | None]], turns: int, steps: int) -> list[list[float]]:
    return [[step_s(engine, kind, steps) for kind in kinds] for _ in range(turns)]


if __name__ == "__main__":
    main()
