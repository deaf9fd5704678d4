"""Weights of a GGUF file: memory-mapped, and dequantized a tensor at a time or kept in the kernels' 8 or 4 bits.

    blocks of a row        32 numbers: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0       256 numbers: Q4_K Q5_K Q6_K
    -> codes, scales, offsets (outputs, groups)         a number is code * scale + offset, exactly what the format says

The layouts are those of ggml (block_q4_0 … block_q6_K); codes of 5 and 6 bits are stored in 8.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field, RootModel
from torch import Tensor

from tandem.checkpoints import TENSORS_FILE, ModelFile, read_bytes
from tandem.engine.quantization import QuantizedWeight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class Codes(NamedTuple):
    """Decoded blocks of rows: `codes` (rows, inputs) uint8; `scales`, `offsets` (rows, groups) float32."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor


class _Entry(ModelFile):
    type: str
    shape: list[int] = Field(min_length=1, max_length=2)
    offset: int = Field(ge=0)
    nbytes: int = Field(ge=0)


class _Entries(RootModel[dict[str, _Entry]]):
    pass


@dataclass(frozen=True, slots=True)
class _GgufSlice:
    """A tensor with the interface of a slice of safetensors: its shape, and some of its rows, which alone are read."""

    file: GgufFile
    name: str

    def get_shape(self) -> list[int]:
        return self.file.entry(self.name).shape

    def __getitem__(self, rows: slice) -> Tensor:
        return self.file.get_rows(self.name, rows)


class GgufFile:
    """A GGUF file with the interface of a safetensors file (`keys`, `get_slice`, `get_tensor`) and Hugging Face names.

    `turned`: the numbers of heads of q_proj and k_proj if the file orders their rows for rotating neighbours, as
    llama's does; the rows are reordered, because the decoder rotates halves.
    """

    def __init__(self, entries: dict[str, _Entry], data: memoryview, turned: dict[str, int]) -> None:
        self._entries = {_renamed(name): entry for name, entry in entries.items()}
        self._data, self._turned = data, turned

    def keys(self) -> list[str]:
        return list(self._entries)

    def entry(self, name: str) -> _Entry:
        return self._entries[name]

    def get_slice(self, name: str) -> _GgufSlice:
        return _GgufSlice(self, name)

    def get_tensor(self, name: str) -> Tensor:
        """Returns a tensor: unchanged if the file has it in a float type of PLAIN, else dequantized to float32."""
        return self._tensor(name, self._entries[name])

    def get_rows(self, name: str, rows: slice) -> Tensor:
        """Returns some rows of a tensor, of whole heads where it has heads."""
        entry = self._entries[name]
        of_each, count = entry.nbytes // entry.shape[0], rows.stop - rows.start
        part = {"shape": [count, *entry.shape[1:]], "offset": entry.offset + rows.start * of_each}
        return self._tensor(name, entry.model_copy(update=part | {"nbytes": count * of_each}))

    def _tensor(self, name: str, entry: _Entry) -> Tensor:
        if entry.type in PLAIN:
            return self._in_order(name, self._bytes(entry).view(PLAIN[entry.type]).view(entry.shape))
        return self._quantized(name, entry).dense(torch.float32)

    def is_quantized(self, name: str) -> bool:
        return self._entries[name].type not in PLAIN

    def quantized(self, name: str) -> QuantizedWeight:
        """Returns a quantized tensor in its own codes.

        Raises:
            ValueError: the tensor's rows are not whole blocks.
        """
        return self._quantized(name, self._entries[name])

    def _quantized(self, name: str, entry: _Entry) -> QuantizedWeight:
        block, read, bits = BLOCKS[entry.type]
        rows, inputs = entry.shape
        if inputs % block.numbers or entry.nbytes != rows * inputs // block.numbers * block.bytes:
            raise ValueError(f"tensor {name}: {entry.nbytes} bytes are no {rows} rows of {inputs} numbers")
        found = read(self._bytes(entry).view(-1, block.bytes))
        codes, scales, offsets = (self._in_order(name, part.reshape(rows, -1)).contiguous() for part in found)
        return QuantizedWeight(codes, scales, offsets, bits)

    def _bytes(self, entry: _Entry) -> Tensor:
        """Copies a tensor's bytes: in the mapped file they may not be aligned for numbers."""
        return torch.frombuffer(bytearray(self._data[entry.offset : entry.offset + entry.nbytes]), dtype=torch.uint8)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        heads = self._turned.get(".".join(name.split(".")[-2:-1]))
        if heads is None:
            return rows
        pairs = self._entries[name].shape[0] // heads // 2
        return rows.view(-1, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@contextmanager
def open_gguf(path: Path, heads: tuple[int, int], rotated_by_neighbours: bool) -> Iterator[GgufFile]:
    """Maps the weights beside `tensors.json` and unmaps them at the end. `heads`: the numbers of heads of q and of k.

    Raises:
        ValueError: the file is shorter than `tensors.json` records.
    """
    entries = _Entries.model_validate_json(read_bytes(path.parent / TENSORS_FILE)).root
    turned = dict(zip(("q_proj", "k_proj"), heads, strict=True)) if rotated_by_neighbours else {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            if any(entry.offset + entry.nbytes > len(view) for entry in entries.values()):
                raise ValueError(f"{path}: is shorter than it was when its folder was made")
            yield GgufFile(entries, view, turned)
        finally:
            view.release()


def joined(parts: Sequence[QuantizedWeight], device: torch.device | None = None) -> QuantizedWeight:
    """Joins weights along their outputs to one weight with the most bits and the smallest groups among them.

    Parts with an order of their inputs must have the same order and groups of the same size.
    """
    group, bits = min(part.group for part in parts), max(part.bits for part in parts)
    columns = zip(*(_in_groups(part, group) for part in parts), strict=True)
    codes, scales, offsets = (torch.cat(column).to(device) for column in columns)
    order = parts[0].order
    return QuantizedWeight(codes, scales, offsets, bits, None if order is None else order.to(device))


def _in_groups(weight: QuantizedWeight, group: int) -> Codes:
    """Returns the weight's codes with a scale for each `group` inputs; `group` divides the weight's own group."""
    times = weight.group // group
    return Codes(weight.codes, *(part.repeat_interleave(times, dim=1) for part in (weight.scales, weight.offsets)))


def _renamed(name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None or found[2] not in _NAMES:
        return name
    layer, inner, kind = found.groups()
    return f"model.layers.{layer}.{_NAMES[inner]}.{kind}" if layer else f"{_NAMES[inner]}.{kind}"


# --- decoders of blocks, which are (blocks, bytes) uint8 ---


def _half(block: Tensor, at: int) -> Tensor:
    """Reads the float16 at byte `at` of each block: (blocks, 1) float32."""
    return block[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpacks all low halves of the bytes, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bit_of_each(block: Tensor, at: int) -> Tensor:
    """Unpacks the bits of the 32-bit little-endian word at byte `at` of each block: (blocks, 32)."""
    word = block[:, at : at + 4]
    return (word[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4(block: Tensor, has_least: bool) -> Codes:
    scale = _half(block, 0)
    codes = _nibbles(block[:, 4 if has_least else 2 :])
    return Codes(codes, scale, _half(block, 2) if has_least else -8 * scale)


def _q5(block: Tensor, has_least: bool) -> Codes:
    scale, at = _half(block, 0), 4 if has_least else 2
    codes = _nibbles(block[:, at + 4 :]) | _bit_of_each(block, at) << 4
    return Codes(codes, scale, _half(block, 2) if has_least else -16 * scale)


def _q8(block: Tensor) -> Codes:
    scale = _half(block, 0)
    return Codes(block[:, 2:] ^ 128, scale, -128 * scale)


def _scales_of_k(block: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the scales and offsets (blocks, 8) of Q4_K and Q5_K: 6 bits each, packed in 12 bytes."""
    packed = block[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    least = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return _half(block, 0) * scales, -(_half(block, 2) * least)


def _q4_k(block: Tensor) -> Codes:
    codes = torch.cat([_nibbles(chunk) for chunk in torch.split(block[:, 16:], 32, dim=1)], dim=1)
    return Codes(codes, *_scales_of_k(block))


def _q5_k(block: Tensor) -> Codes:
    low = torch.cat([_nibbles(chunk) for chunk in torch.split(block[:, 48:], 32, dim=1)], dim=1)
    high = (block[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    return Codes(low | high << 4, *_scales_of_k(block))


def _q6_k(block: Tensor) -> Codes:
    halves, shifts = [], torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    for half in (0, 1):
        low, high = block[:, 64 * half : 64 * half + 64], block[:, 128 + 32 * half : 160 + 32 * half]
        halves.append(_nibbles(low) | (high[:, None] >> shifts & 3).flatten(1) << 4)
    scales = _half(block, 208) * block[:, 192:208].contiguous().view(torch.int8)
    return Codes(torch.cat(halves, dim=1), scales, -32 * scales)


class Block(NamedTuple):
    numbers: int
    bytes: int


BLOCKS: dict[str, tuple[Block, Callable[[Tensor], Codes], int]] = {
    "Q4_0": (Block(32, 18), partial(_q4, has_least=False), 4),
    "Q4_1": (Block(32, 20), partial(_q4, has_least=True), 4),
    "Q5_0": (Block(32, 22), partial(_q5, has_least=False), 8),
    "Q5_1": (Block(32, 24), partial(_q5, has_least=True), 8),
    "Q8_0": (Block(32, 34), _q8, 8),
    "Q4_K": (Block(256, 144), _q4_k, 4),
    "Q5_K": (Block(256, 176), _q5_k, 8),
    "Q6_K": (Block(256, 210), _q6_k, 8),
}
