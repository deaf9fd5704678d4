"""The served model as the gateway knows it: its words, its chat format, its defaults. No weights.

tokenizer.json                                  -> Tokenizer
chat_template.jinja | tokenizer_config.json     -> ChatTemplate
generation_config.json                          -> what a request that says nothing gets
config.json                                     -> end-of-text ids, context length
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.text import ChatTemplate, Tokenizer
from tandem.grammar import end_tokens
from tandem.sampling import OF_MODEL


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    max_model_len: int
    created: int  # Unix seconds

    @classmethod
    def load(cls, folder: Path, name: str, created: int) -> ServedModel:
        """
        Raises:
            FileNotFoundError: the folder lacks tokenizer.json or config.json.
            ValueError: config.json does not say how long a context may be.
        """
        config, generation = _read(folder / "config.json"), _read_if_there(folder / "generation_config.json")
        return cls(
            name=name or folder.resolve().name,
            tokenizer=Tokenizer.load(folder),
            chat_template=ChatTemplate.load(folder),
            eos_token_ids=end_tokens(folder),
            defaults={key: generation[key] for key in OF_MODEL if generation.get(key) is not None},
            max_model_len=_context_length(config, folder),
            created=created,
        )


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _read_if_there(file: Path) -> dict[str, Any]:
    return _read(file) if file.is_file() else {}


def _context_length(config: Mapping[str, Any], folder: Path) -> int:
    length = config.get("max_position_embeddings")
    if not isinstance(length, int):
        raise ValueError(f"{folder / 'config.json'}: max_position_embeddings is missing")
    return length
