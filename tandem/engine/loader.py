"""Weights from a Hugging Face folder into a model's own storage.

1 find     model.safetensors.index.json names the shards, or there is one model.safetensors
2 compare  the names and shapes in the shards with the ones the model needs: missing, extra or mis-shaped is an error
3 copy     each tensor to where it belongs, from a mapping of its own, let go at once: nothing is held twice
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine.models import Decoder
from tandem.engine.types import Progress
from tandem.model_files import ModelFile, read_file

_PAGE = 4096
_PAGES_PER_SHARD = 1024
_MAX_HEADER = 100 * 10**6  # safetensors' own


class IndexFile(ModelFile):
    weight_map: dict[str, str]


def load_weights(model: Decoder, path: Path, on_progress: Progress | None = None) -> None:
    """Fill `model` from the folder at `path`. ValueError says which tensor or file is wrong."""
    targets, sources = model.checkpoint_tensors(), find_weights(model, path)
    total, done = sum(t.nbytes for t in targets.values()), 0
    for name, shard in sources.items():
        with _open(shard) as file:
            targets[name].copy_(file.get_tensor(name))
        done += targets[name].nbytes
        if on_progress is not None:
            on_progress("weights", done, total)


def find_weights(model: Decoder, path: Path) -> dict[str, Path]:
    """Which shard holds each tensor that `model` needs, even one without memory. ValueError says what is wrong."""
    targets = model.checkpoint_tensors()
    sources, shapes = {}, {}
    for shard in shard_paths(path):
        with _open(shard) as file:
            for name in file.keys():  # noqa: SIM118
                if not _redundant(name, targets):
                    sources[name], shapes[name] = shard, list(file.get_slice(name).get_shape())
    _compare(shapes, targets, path)
    return sources


def shard_paths(path: Path) -> list[Path]:
    """The safetensors files of the folder at `path`, in a fixed order."""
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(read_file(IndexFile, index).weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map: {name!r} is no file's name within the folder")
        if not (path / name).is_file():
            raise ValueError(f"model_path: {path / name} does not exist")
    return [path / name for name in names]


def weights_revision(path: Path) -> str:
    """A fingerprint of the folder's weights: equal on every machine, changed by any retraining.

    Reads the config, the shards' headers and pages spread over them, so that a big model costs no second read.
    """
    digest = blake2b((path / "config.json").read_bytes(), digest_size=16)
    for shard in shard_paths(path):
        digest.update(shard.name.encode() + shard.stat().st_size.to_bytes(8, "little"))
        for page in _pages(shard):
            digest.update(page)
    return digest.hexdigest()


def _pages(shard: Path) -> Iterator[bytes]:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header = file.read(8)
        yield header + file.read(min(int.from_bytes(header, "little"), _MAX_HEADER))
        for offset in range(0, size, max(_PAGE, size // _PAGES_PER_SHARD)):
            file.seek(offset)
            yield file.read(_PAGE)


def _open(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{shard}: {error}") from error


def _redundant(name: str, targets: Mapping[str, Tensor]) -> bool:
    """Tensors that some checkpoints carry though the config already says what they hold."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in targets)


def _compare(shapes: Mapping[str, list[int]], targets: Mapping[str, Tensor], path: Path) -> None:
    for problem, names in (("missing", targets.keys() - shapes.keys()), ("extra", shapes.keys() - targets.keys())):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")
            raise ValueError(f"{path}: {len(names)} {problem} tensors: {shown}")
    for name, found in shapes.items():
        needed = list(targets[name].shape)
        if found != needed:
            raise ValueError(f"{path}: tensor {name} has shape {found}, the config says {needed}")
