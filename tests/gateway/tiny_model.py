"""A model folder without weights: a byte-level BPE tokenizer that splits characters, a chat template, configs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|end|>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "once upon a time there was a small fox",
    "ok é",
]
TEMPLATE = (
    "{{ bos_token }}{% if tone %}({{ tone }} {{ reasoning_effort }}){% endif %}"
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + m['role']) }}{% endif %}"
    "{% if m['content'] == 'refuse me' %}{{ raise_exception('I refuse') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Merges are few, so that most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_model(folder: Path, context: int = 512) -> Path:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": EOS}}), encoding="utf-8"
    )
    (folder / "config.json").write_text(
        json.dumps({"max_position_embeddings": context, "eos_token_id": 0}), encoding="utf-8"
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0], "temperature": 0.6, "top_k": 20}), encoding="utf-8"
    )
    return folder


def large_tokenizer(num_words: int, seed: int = 0) -> Tokenizer:
    """A byte-level BPE of so many words, merged of random ones before them."""
    random, alphabet = Random(seed), sorted(pre_tokenizers.ByteLevel.alphabet())
    words, merges = dict.fromkeys(alphabet), []
    known = list(words)
    while len(known) < num_words:
        left, right = random.choice(known), random.choice(known)
        if left + right not in words and len(left + right) <= 16:
            words[left + right] = None
            known.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(known)}, merges, ignore_merges=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, known[300]])
    return tokenizer
