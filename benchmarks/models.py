"""The benchmarks' models: real shapes, random weights, made here once from a seed.

1. train a byte-level BPE on the standard library's sources, padded to the vocabulary
2. draw a Qwen2 of the shape, in bfloat16
3. save both as a complete Hugging Face folder, in a folder beside its place; then rename it there
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OUT = Path(__file__).parent / "out"
SEED = 20
CORPUS_FILES = 400
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 model's sizes; `name` is its folder's and the name it is served under."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_positions: int = 4096

    @property
    def folder(self) -> Path:
        return OUT / "models" / self.name

    @property
    def block_parameters(self) -> int:
        """Weights that every token is multiplied with before the last layer's end: no embedding, no head."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Weights read for one token; biases and norms, a thousandth of them, are left out."""
        return self.block_parameters + self.vocab * self.hidden


LARGE = Shape("qwen2-387m", 896, 24, 14, 2, 4864, 32_000)
SMALL = Shape("qwen2-15m", 256, 8, 4, 2, 1968, 4096)


def made(shape: Shape, folder: Path | None = None) -> Path:
    """The model's folder, made on the first call."""
    place = folder or shape.folder
    if not (place / "config.json").is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as half:
            made_here = Path(half) / "model"
            _save_weights(shape, made_here)
            _save_tokenizer(shape, made_here)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(made_here, place)
    return place


def _save_weights(shape: Shape, folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_positions, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(SEED)
    model: torch.nn.Module = Qwen2ForCausalLM(config)
    model.bfloat16().save_pretrained(folder)  # type: ignore[operator]


def _save_tokenizer(shape: Shape, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_corpus(), trainer)
    missing = shape.vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|unused{i}|>", normalized=False) for i in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2), encoding="utf-8")


def _corpus() -> Iterator[str]:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("[a-h]*/*.py")
    )
    for source in sources[:CORPUS_FILES]:
        yield source.read_text(encoding="utf-8", errors="ignore")


if __name__ == "__main__":
    for shape in (LARGE, SMALL):
        print(made(shape))
