"""Loading weights from a Hugging Face folder into a model's own storage.

1 find     model.safetensors.index.json names the shards, or there is one model.safetensors, or a model.gguf
2 compare  the names and shapes in the shards with the ones the model needs: missing, extra or mis-shaped is an error
3 copy     each tensor to its storage, from its own mapping, which is unmapped immediately: no tensor is held twice;
           quantized layers of the checkpoint stay quantized, in the engine's own form (checkpoint_formats.py)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.checkpoints import WEIGHTS_FILE, ModelFile, read_file
from tandem.engine.models import Decoder, Linear
from tandem.engine.quantization import CheckpointFormat, Fp8Weight, QuantizedWeight, as_fp8
from tandem.engine.types import Progress
from tandem.engine.weights.gguf_weights import joined, open_gguf
from tandem.engine.weights.stacked import Unstacked

Shapes = dict[str, list[int]]


class IndexFile(ModelFile):
    weight_map: dict[str, str]


def load_weights(
    model: Decoder, path: Path, on_progress: Progress | None = None, keep_codes: bool = False,
    rows: Mapping[str, Sequence[range]] | None = None,
) -> None:  # fmt: skip
    """Fills `model` from the folder at `path`. Raises ValueError naming the tensor or file that is wrong.

    `keep_codes`: quantized tensors of a GGUF file stay quantized; otherwise they are dequantized, one at a time.
    `rows`: the rows of a checkpoint's tensor that the model has, by the layer or tensor of which it has only a part.
    """
    whole = model if rows is None else Decoder(model.config, torch.float32, "meta")
    targets, sources, rows = model.checkpoint_tensors(), find_weights(whole, path), rows or {}
    wanted = {name: tensor.nbytes for name, tensor in targets.items() if _is_there(model, name, sources)}
    total, done = sum(wanted.values()), 0

    def note(*names: str) -> None:
        nonlocal done
        done += sum(wanted[name] for name in names)
        if on_progress is not None:
            on_progress("weights", done, total)

    kept = _load_codes(model, path, rows, note) if keep_codes and (path / WEIGHTS_FILE).exists() else set()
    for name in wanted:
        if name not in kept and not _is_packed(model, name, sources):
            with _open(sources[name], model) as file:
                targets[name].copy_(_rows_of(file, name, rows))
            note(name)
    if (form := model.config.quantized) is not None:
        sizes_of = {names: sizes for _, names, sizes in whole.fused()}
        for linear, names, _ in model.fused():
            _load_packed(model, linear, names, sizes_of[names], form, sources, rows)
            weights = [f"{name}.weight" for name in names]
            note(*(weight for weight in weights if _is_packed(model, weight, sources)))


def _rows_of(file: Any, name: str, rows: Mapping[str, Sequence[range]]) -> Tensor:
    """Reads a tensor, or only those of its rows that are needed."""
    needed = rows.get(name) or rows.get(name.rpartition(".")[0])
    if needed is None:
        tensor: Tensor = file.get_tensor(name)
        return tensor
    whole = file.get_slice(name)
    return torch.cat([whole[part.start : part.stop] for part in needed])


def _load_codes(model: Decoder, path: Path, rows: Mapping[str, Sequence[range]], note: Callable[..., None]) -> set[str]:
    """Loads a GGUF file's quantized layers, embedding and head without dequantizing them. Returns the names of their
    weights, and calls `note` with each name once it is loaded."""
    kept: set[str] = set()
    with _open(path / WEIGHTS_FILE, model) as file:
        for linear, layers, _ in model.fused():
            names = [f"{layer}.weight" for layer in layers]
            if all(map(file.is_quantized, names)):
                linear.weight = joined(
                    [_rows_in(file.quantized(f"{layer}.weight"), rows.get(layer)) for layer in layers]
                )
                kept.update(names)
                note(*names)
        head = "model.embed_tokens.weight" if model.lm_head is model.embed else "lm_head.weight"
        if file.is_quantized(head):
            tied = model.lm_head is model.embed
            model.lm_head = joined([_rows_in(file.quantized(head), rows.get(head.removesuffix(".weight")))])
            model.embed = model.lm_head if tied else model.embed
            kept.add(head)
            note(head)
    return kept


def read_tensors(path: Path, *names: str) -> dict[str, Tensor]:
    """Reads the tensors `names` from the folder at `path`; a missing name is left out of the result."""
    found: dict[str, Tensor] = {}
    for shard in shard_paths(path):
        with _open(shard) as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
    return found


def find_weights(model: Decoder, path: Path) -> dict[str, Path]:
    """Finds the shard of each tensor that `model` needs; the model may be on the meta device. Raises ValueError."""
    targets = model.checkpoint_tensors()
    sources, shapes = {}, {}
    for shard in shard_paths(path):
        with _open(shard, model) as file:
            for name in file.keys():  # noqa: SIM118
                if not _redundant(name, targets) and not _is_further(name, model):
                    sources[name], shapes[name] = shard, list(file.get_slice(name).get_shape())
    needed = {name: list(tensor.shape) for name, tensor in targets.items()}
    _compare(shapes, *_as_packed(model, needed, sources), path)
    return sources


def _as_packed(model: Decoder, needed: Shapes, sources: Mapping[str, Path]) -> tuple[Shapes, Shapes]:
    """Replaces the weights of quantized layers in `needed` by their tensors; also returns their optional tensors."""
    optional: Shapes = {}
    form = model.config.quantized
    for linear, names, sizes in model.fused() if form else ():
        inputs = linear.weight.shape[1]
        for name, outputs in zip(names, sizes, strict=True):
            if form is None or f"{name}.{form.marker}" not in sources:
                continue
            del needed[f"{name}.weight"]
            needed |= {f"{name}.{kind}": list(shape) for kind, shape in form.needed(outputs, inputs).items()}
            optional |= {f"{name}.{kind}": list(shape) for kind, shape in form.optional(outputs, inputs).items()}
            if linear.bias is None:
                optional[f"{name}.bias"] = [outputs]
    return needed, optional


def _is_there(model: Decoder, name: str, sources: Mapping[str, Path]) -> bool:
    """True if the checkpoint has the tensor, plain or quantized: it may leave out biases of quantized layers."""
    return name in sources or _is_packed(model, name, sources)


def _is_packed(model: Decoder, name: str, sources: Mapping[str, Path]) -> bool:
    """True for the weight of a layer that the checkpoint holds quantized."""
    form, (layer, _, kind) = model.config.quantized, name.rpartition(".")
    return kind == "weight" and form is not None and f"{layer}.{form.marker}" in sources


def _load_packed(
    model: Decoder, linear: Linear, names: Sequence[str], sizes: Sequence[int], form: CheckpointFormat,
    sources: Mapping[str, Path], rows: Mapping[str, Sequence[range]],
) -> None:  # fmt: skip
    """Loads a linear layer's quantized parts, of `sizes` outputs in the checkpoint. The layer stays quantized if all
    parts are quantized alike; otherwise the quantized parts are dequantized."""
    inputs, parts = linear.weight.shape[1], list[QuantizedWeight | Fp8Weight | Tensor | None]()
    assert isinstance(linear.weight, Tensor)
    for name, outputs in zip(names, sizes, strict=True):
        kinds = form.needed(outputs, inputs) | form.optional(outputs, inputs)
        found = dict(_tensors_of(model, name, kinds, sources))
        try:
            parts.append(form.read(found, outputs, inputs) if f"{name}.{form.marker}" in sources else None)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if linear.bias is None and any(bias.any() for _, bias in _tensors_of(model, name, ("bias",), sources)):
            raise ValueError(f"tensor {name}.bias: the model has no bias there")
    parts = [part if part is None else _part_of(part, rows.get(name)) for part, name in zip(parts, names, strict=True)]
    in_fp8 = [part for part in parts if isinstance(part, Fp8Weight | Tensor)]
    if len(in_fp8) == len(parts) and linear.weight.is_cuda:
        linear.weight = as_fp8(in_fp8, linear.weight.device)
        return
    packed = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(packed) == len(parts) and all(_lies_as(part, packed[0]) for part in packed):
        linear.weight = joined(packed, linear.weight.device)
        return
    for part, target in zip(parts, torch.split(linear.weight, list(linear.parts.values())), strict=True):
        if part is not None:
            target.copy_(part if isinstance(part, Tensor) else part.dense(target.dtype))


def _part_of(
    part: QuantizedWeight | Fp8Weight | Tensor, rows: Sequence[range] | None
) -> QuantizedWeight | Fp8Weight | Tensor:
    """Returns the rows of a quantized weight that are needed; None: all."""
    if rows is None:
        return part
    if isinstance(part, QuantizedWeight):
        return _rows_in(part, rows)
    which = _numbers(rows)
    return (part if isinstance(part, Tensor) else part.dense(torch.float32))[which]


def _rows_in(weight: QuantizedWeight, rows: Sequence[range] | None) -> QuantizedWeight:
    if rows is None:
        return weight
    codes, scales, offsets = (part[_numbers(rows)] for part in (weight.codes, weight.scales, weight.offsets))
    return replace(weight, codes=codes, scales=scales, offsets=offsets)


def _numbers(rows: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(some.start, some.stop) for some in rows])


def _lies_as(part: QuantizedWeight, other: QuantizedWeight) -> bool:
    """True if both can be joined to one weight: their inputs have the same groups and the same order."""
    if part.order is None or other.order is None:
        return part.group == other.group and part.order is other.order
    return part.group == other.group and torch.equal(part.order, other.order)


def _tensors_of(
    model: Decoder, layer: str, kinds: Iterable[str], sources: Mapping[str, Path]
) -> Iterator[tuple[str, Tensor]]:
    for kind in kinds:
        if (name := f"{layer}.{kind}") in sources:
            with _open(sources[name], model) as file:
                yield kind, file.get_tensor(name)


def shard_paths(path: Path) -> list[Path]:
    """Returns the weight files of the folder at `path`, in a fixed order. Raises ValueError if one is missing."""
    index = path / "model.safetensors.index.json"
    names = [WEIGHTS_FILE if (path / WEIGHTS_FILE).exists() else "model.safetensors"]
    if index.is_file():
        names = sorted(set(read_file(IndexFile, index).weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map: {name!r} is no file's name within the folder")
        if not (path / name).is_file():
            raise ValueError(f"model_path: {path / name} does not exist")
    return [path / name for name in names]


def _open(shard: Path, model: Decoder | None = None) -> Any:
    """Opens a shard for reading tensors by name. `model`: the model they are for; reading a GGUF file needs it."""
    if shard.name == WEIGHTS_FILE and model is not None:
        config = model.config
        return open_gguf(shard, (config.num_heads, config.num_kv_heads), config.model_type in ("llama", "mistral"))
    try:
        file = safe_open(shard, framework="pt")
        experts = model.config.experts if model is not None else None
        return Unstacked(file) if experts is not None and experts.is_stacked else file
    except SafetensorError as error:
        raise ValueError(f"{shard}: {error}") from error


def _redundant(name: str, targets: Mapping[str, Tensor]) -> bool:
    """True for tensors that some checkpoints contain although the config determines their contents."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in targets)


def _is_further(name: str, model: Decoder) -> bool:
    """True for tensors of the layers after DeepSeek-V3's last one, which predict further tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", name) if model.config.model_type == "deepseek_v3" else None
    return layer is not None and int(layer[1]) >= model.config.num_layers


def _compare(shapes: Shapes, needed: Shapes, optional: Shapes, path: Path) -> None:
    extra = shapes.keys() - needed.keys() - optional.keys()
    for problem, names in (("missing", needed.keys() - shapes.keys()), ("extra", extra)):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")
            raise ValueError(f"{path}: {len(names)} {problem} tensors: {shown}")
    for name, found in shapes.items():
        wanted = (needed | optional)[name]
        if found != wanted:
            raise ValueError(f"{path}: tensor {name} has shape {found}, the config says {wanted}")
