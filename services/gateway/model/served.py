"""The served model as the gateway knows it: tokenizer, chat format, defaults. No weights.

tokenizer.json                                  -> Tokenizer
chat_template.jinja | tokenizer_config.json     -> ChatTemplate, how it calls tools and thinks aloud
tokenizer_config.json's tool_parser             -> how it calls tools, where the template shows nothing
generation_config.json                          -> what a request that says nothing gets
config.json                                     -> end-of-text ids, context length
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.gateway.model.aliases import Via
from services.gateway.model.rendering import ModelHelper
from services.gateway.model.template_files import read_template
from services.gateway.text import MOST_TOKENS, Tokenizer
from services.gateway.tools import FORMATS, TAGS, CallFormat, Tags, detect_format, detect_tags
from services.gateway.untrusted import ChatTemplate, TokenizerParts
from tandem.adapters import AdapterRef
from tandem.checkpoints import ContextFile, GenerationFile, end_tokens, read_file, read_tokenizer_config
from tandem.sampling import OF_MODEL, InvalidParameter, SamplingParams


@dataclass(frozen=True, slots=True)
class CheckedFiles:
    """Files that could do harm, checked by a helper process.

    Args:
        parts: the tokenizer.json, if it was divided.
    """

    helper: ModelHelper
    template: ChatTemplate | None
    parts: TokenizerParts | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    max_model_len: int
    created: int  # Unix seconds
    helper: ModelHelper
    adapter: AdapterRef | None = None
    parent: str = ""  # for an adapter: the model's name
    calls: type[CallFormat] | None = None  # how it writes tool calls
    thoughts: Tags | None = None
    via: Via | None = None  # if an alias was asked for

    def adapted(self, ref: AdapterRef) -> ServedModel:
        return replace(self, name=ref.name, adapter=ref, parent=self.name)

    @classmethod
    def load(
        cls, folder: Path, name: str, created: int, tool_parser: str = "auto", reasoning_parser: str = "auto",
        checked: CheckedFiles | None = None,
    ) -> ServedModel:  # fmt: skip
        """
        Args:
            tool_parser, reasoning_parser: a name, "auto" for what the chat template shows, or "none".
            checked: None trusts the files, as in a simulation.

        Raises:
            FileNotFoundError: the folder lacks tokenizer.json or config.json.
            ValueError: one of them is malformed; names the file and the field.
        """
        generation = folder / "generation_config.json"
        checked = checked or CheckedFiles(ModelHelper(None, name), read_template(folder), None)
        template = checked.template
        source = template.source if template else ""
        calls: str | None = tool_parser
        if tool_parser == "auto":
            calls = detect_format(source) or read_tokenizer_config(folder).tool_parser
        thoughts = detect_tags(source) if reasoning_parser == "auto" else reasoning_parser
        max_model_len = read_file(ContextFile, folder / "config.json").max_position_embeddings
        tokenizer = Tokenizer.load(folder, max(MOST_TOKENS, max_model_len), checked.parts)
        return cls(
            name=name,
            tokenizer=tokenizer,
            chat_template=template,
            eos_token_ids=end_tokens(folder, tokenizer.token_id),
            defaults=_defaults(generation) if generation.is_file() else {},
            max_model_len=max_model_len,
            created=created,
            helper=checked.helper,
            calls=FORMATS.get(calls or ""),
            thoughts=TAGS.get(thoughts or ""),
        )


def _defaults(file: Path) -> dict[str, float]:
    """Raises ValueError: a default that cannot be served."""
    said: dict[str, float] = read_file(GenerationFile, file).model_dump(exclude_none=True)
    found = {name: said[name] for name in OF_MODEL if name in said}
    if "max_new_tokens" in said:
        found["max_tokens"] = said["max_new_tokens"]
    try:
        SamplingParams.of(found)
    except InvalidParameter as error:
        raise ValueError(f"{file}: {error}") from None
    return found
