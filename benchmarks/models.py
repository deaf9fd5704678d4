"""The benchmarks' models: real shapes, random weights, made here once from a seed.

1. train a byte-level BPE on the standard library's sources, padded to the vocabulary
2. draw a Qwen2, Qwen3-MoE or Gemma 3 of the shape, in bfloat16
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
from typing import Any

OUT = Path(__file__).parent / "out"
SEED = 20
CORPUS_FILES = 400
PER_TOKEN = 2  # experts
WORDS = 32_000  # the most that the corpus gives; a larger vocabulary is padded
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes; `name` is its folder's and the name it is served under.

    A Qwen2; with `experts`, of which each token has two, a Qwen3-MoE; with a `window`, which five layers of six have,
    a Gemma 3.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_positions: int = 4096
    head_dim: int = 0  # 0: hidden / heads
    experts: int = 0
    window: int = 0

    @property
    def folder(self) -> Path:
        return OUT / "models" / self.name

    @property
    def block_parameters(self) -> int:
        """Weights that every token is multiplied with before the last layer's end: no embedding, no head."""
        attention = 2 * self.hidden * (self.head_dim or self.hidden // self.heads) * (self.heads + self.kv_heads)
        inner = 3 * self.intermediate * PER_TOKEN + self.experts if self.experts else 3 * self.intermediate
        return self.layers * (attention + self.hidden * inner)

    @property
    def parameters(self) -> int:
        """Weights read for one token; biases and norms, a thousandth of them, are left out."""
        return self.block_parameters + self.vocab * self.hidden


LARGE = Shape("qwen2-387m", 896, 24, 14, 2, 4864, 32_000)
SMALL = Shape("qwen2-15m", 256, 8, 4, 2, 1968, 4096)
MOE = Shape("qwen3-moe-1b", 1024, 16, 16, 4, 2560, 32_000, head_dim=64, experts=8)
WINDOWS = Shape("gemma3-270m", 640, 18, 4, 1, 2048, 262_144, head_dim=256, window=512)
MODELS = {"large": LARGE, "small": SMALL, "moe": MOE, "windows": WINDOWS}


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
    from transformers import AutoConfig, AutoModelForCausalLM

    family: Any = AutoModelForCausalLM
    name, own = _family(shape)
    sizes = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_positions, "tie_word_embeddings": True, "bos_token_id": 0,
        "eos_token_id": 0, "pad_token_id": 0, "dtype": "bfloat16",
    }  # fmt: skip
    torch.manual_seed(SEED)
    family.from_config(AutoConfig.for_model(name, **sizes, **own)).bfloat16().save_pretrained(folder)


def _family(shape: Shape) -> tuple[str, dict[str, Any]]:
    """Returns its model_type and its own fields of config.json."""
    if shape.experts:
        return "qwen3_moe", {
            "head_dim": shape.head_dim, "num_experts": shape.experts, "num_experts_per_tok": PER_TOKEN,
            "moe_intermediate_size": shape.intermediate, "norm_topk_prob": True,
        }  # fmt: skip
    if shape.window:
        return "gemma3_text", {
            "head_dim": shape.head_dim, "query_pre_attn_scalar": shape.head_dim, "sliding_window": shape.window,
        }  # fmt: skip
    return "qwen2", {}


def _save_tokenizer(shape: Shape, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(shape.vocab, WORDS), special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_corpus(), trainer)
    words = json.loads(tokenizer.to_str())
    words["model"]["vocab"] |= {f"<|unused{i}|>": i for i in range(tokenizer.get_vocab_size(), shape.vocab)}
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2), encoding="utf-8")


def _corpus() -> Iterator[str]:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("[a-h]*/*.py")
    )
    for source in sources[:CORPUS_FILES]:
        yield source.read_text(encoding="utf-8", errors="ignore")


if __name__ == "__main__":
    for shape in MODELS.values():
        print(made(shape))
