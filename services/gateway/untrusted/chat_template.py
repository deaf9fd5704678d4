"""A model's chat template: messages to the text the model was trained on.

Rendered as Hugging Face does it: a sandboxed Jinja environment with trimmed blocks, `raise_exception`,
`strftime_now`, `generation`, a `tojson` that leaves characters alone, and the model's bos and eos tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ConfigDict

from services.gateway.text.history import ChatShape
from tandem.checkpoints import ModelFile, read_bytes, read_file

# What clients call the roles, and what templates do.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What a template can raise over messages that it was not written for.
REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class TemplateRefused(ValueError):
    """The template does not take these messages; the text says why."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is the beginning of the answer
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


DEFAULTS = TemplateOptions()


class ChatTemplate:
    def __init__(
        self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] = lambda: datetime.now().astimezone()
    ) -> None:
        """`tokens` are the special tokens by role: bos_token, eos_token, ...

        Raises:
            jinja2.TemplateSyntaxError
        """
        self.source = source
        self._tokens = dict(tokens)
        self._template = _compile(source, now)
        self._shape = ChatShape(source)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """From chat_template.jinja, else tokenizer_config.json; None where the model has none.

        Raises:
            ValueError: one of them is malformed.
        """
        file, beside = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_file(_ConfigFile, file) if file.is_file() else _ConfigFile()
        source = read_bytes(beside).decode() if beside.is_file() else _default(config.chat_template)
        try:
            return cls(source, _special_tokens(config.model_extra or {})) if source else None
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"{beside if beside.is_file() else file}: chat_template: {error}") from None

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, str]]]:
        """Another process compiles it again, and has the time itself."""
        return ChatTemplate, (self.source, self._tokens)

    @cached_property
    def takes_system(self) -> bool:
        """True if a system message is shown; some templates refuse it, some leave it out."""
        return self._shows_in_order(["system", "user"])

    @cached_property
    def takes_late_system(self) -> bool:
        """True if a system message is shown where it is, also behind others."""
        return self._shows_in_order(["user", "system", "assistant", "user", "system"])

    def _shows_in_order(self, roles: Sequence[str]) -> bool:
        """Probe it with a message of each role."""
        marks = [f"message {i}" for i in range(len(roles))]
        try:
            text = self.render([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        except TemplateRefused:
            return False
        places = [text.find(mark) for mark in marks]
        return places[0] >= 0 and places == sorted(places)

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = DEFAULTS) -> str:
        """The prompt, ready for the assistant's answer.

        Raises:
            TemplateRefused: the template raised, or does not fit the messages.
        """
        try:
            text = self._template.render(
                {
                    **self._tokens, **self._shape.variables(options.tools, options.variables),
                    "messages": self._shape.messages(messages, options.tools),
                    "add_generation_prompt": options.add_generation_prompt,
                }
            )  # fmt: skip
        except REFUSALS as error:
            raise TemplateRefused(str(error)) from None
        return _up_to(text, messages[-1]["content"]) if options.continue_final_message else text


def _up_to(text: str, content: str) -> str:
    """A prompt without what the template has put behind its last message."""
    for ending in (content, content.strip()):
        if (start := text.rfind(ending)) >= 0:
            return text[: start + len(ending)]
    raise TemplateRefused("the last message is not in the prompt as it is, so it cannot be continued")


class _Generation(Extension):
    """{% generation %}, which marks for training what an assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, now: Callable[[], datetime]) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


class _Named(ModelFile):
    name: str
    template: str


class _ConfigFile(ModelFile):
    """tokenizer_config.json, whose other fields may be special tokens."""

    model_config = ConfigDict(extra="allow")

    chat_template: str | list[_Named] | None = None


def _default(template: str | list[_Named] | None) -> str | None:
    """A template, or of several named ones the default."""
    if isinstance(template, list):
        return next((one.template for one in template if one.name == "default"), None)
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
