"""Tokenizers of four kinds, as models have them, over one small text: for tests of all that turns tokens into text.

ours      byte-level, one special token at the beginning: the demo model's
padded    the same, of a model that has more logits than its tokenizer has words, as Qwen's have
spaced    SentencePiece with byte fallback, as Llama 2's: "▁" for a space, <0xE2> for a byte
holed     byte-level, with special and added tokens among the other ids, two of the same bytes, and ids without any
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "models" / "demo" / "target"
NAMES = ("ours", "padded", "spaced", "holed")
PADDING = 70  # rows of `padded` beyond its words
HOLE = 103  # the first of two ids of `holed` that no token has
MIDDLE = {"<|middle|>": 100, "<note>": 101, " the": 102}  # tokens of `holed`, of which the first one is special
ENDS = {"ours": 0, "padded": 0, "spaced": 2, "holed": 0}
# What tokenizers trip over: tokens' own texts, the space's stand-in, characters of several bytes, spaces in a row.
TEXTS = (
    "the time", " the time", "🦜 é", "  two\n\tlines ", "▁ x▁", "<0x41>", "</s><s>", "<|middle|> <note> the",
    "<|endoftext|>", "狐狸 and\u0301", '{"city name": "New York"}', " ", "\n", "Ġtime", "\ufffd",
)  # fmt: skip


def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_str(_json_of(name))


@cache
def _json_of(name: str) -> str:
    if name == "spaced":
        return _spaced().to_str()
    demo = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    return _holed(demo) if name == "holed" else demo


def _spaced() -> Tokenizer:
    plain = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    special = ["<unk>", "<s>", "</s>"]
    words = (ROOT / "LICENSE").read_text(encoding="utf-8").replace(" ", " ▁").split(" ")
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    plain.train_from_iterator(words, trainer)
    said = json.loads(plain.to_str())
    said["added_tokens"] = [token for token in said["added_tokens"] if token["content"] in special]
    made = Tokenizer.from_str(json.dumps(said))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def _holed(demo: str) -> str:
    said: dict[str, Any] = json.loads(demo)
    moved = len(MIDDLE) + 2
    words = {word: i + moved if i >= 100 else i for word, i in said["model"]["vocab"].items()}
    said["model"]["vocab"] = words | MIDDLE
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    said["added_tokens"] += [{"id": i, "content": word, "special": i == 100, **flags} for word, i in MIDDLE.items()]
    return json.dumps(said, ensure_ascii=False)


def rows_of(name: str) -> int:
    """Returns the number of logits of its model."""
    return max(tokenizer_of(name).get_vocab().values()) + 1 + (PADDING if name == "padded" else 0)


def model_of(name: str, folder: Path) -> Path:
    """Returns the folder of a model with that tokenizer, and with the demo model's weights: a word may be any other."""
    import torch  # which takes longer to import than most tests of tokenizers take
    from safetensors.torch import load_file, save_file

    made = folder / name
    shutil.copytree(DEMO, made)
    tokenizer_of(name).save(str(made / "tokenizer.json"))
    rows = rows_of(name)
    weights = load_file(made / "model.safetensors")
    words = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = words[torch.arange(rows) % len(words)].contiguous()
    save_file(weights, made / "model.safetensors")
    special = {"eos_token_id": ENDS[name], "bos_token_id": ENDS[name], "pad_token_id": ENDS[name]}
    for file, more in (("config.json", {"vocab_size": rows}), ("generation_config.json", {})):
        (made / file).write_text(
            json.dumps({**json.loads((made / file).read_text(encoding="utf-8")), **special, **more}), encoding="utf-8"
        )
    return made
