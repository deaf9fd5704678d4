"""A model's chat template: turns messages into the model's prompt, exactly as transformers does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Template

from services.gateway.untrusted.environment import compiled
from services.gateway.untrusted.probing import TemplateFacts, probe
from services.gateway.untrusted.shapes import ChatShape

# Roles by the client's names, and what templates call them.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Put after content that is to be continued, to find its end in the rendered text.
CONTINUED = "CONTINUED_FROM_HERE_ONWARD "
MAX_REASON = 500
KEPT_TEMPLATES = 64


class TemplateRefused(ValueError):
    """The template refuses these messages; the text names the reason."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is the beginning of the answer
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


DEFAULTS = TemplateOptions()


class ChatTemplate:
    """A chat template, compiled when first used. It is pickled as its source and its facts.

    Args:
        tokens: the special tokens by role: bos_token, eos_token, ...
        for_tools: the template to use where tools are offered.
        facts: what a probe has found out.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] | None = None,
        for_tools: ChatTemplate | None = None, facts: TemplateFacts | None = None,
    ) -> None:  # fmt: skip
        self._source, self._tokens = source, dict(tokens)
        self._now = now or (lambda: datetime.now().astimezone().replace(tzinfo=None))
        self._for_tools = for_tools
        self._shape = ChatShape(source)
        if facts is not None:
            self.facts = facts

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[Any, ...]]:
        return ChatTemplate, (self._source, self._tokens, None, self._for_tools, self.__dict__.get("facts"))

    @property
    def source(self) -> str:
        """The source of all its templates, to be searched."""
        return f"{self._source}\n{self._for_tools.source}" if self._for_tools else self._source

    @cached_property
    def facts(self) -> TemplateFacts:
        """Raises ValueError: the template cannot be compiled."""
        self._compiled  # noqa: B018

        def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
            try:
                return self._render(messages, DEFAULTS)
            except TemplateRefused:
                return None

        return probe(render)

    @cached_property
    def _compiled(self) -> Template:
        try:
            return compiled(self._source, self._now)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(f"chat_template: {_reason(error)}") from None

    def checked(self) -> ChatTemplate:
        """Returns itself, once its facts are known.

        Raises:
            ValueError: it cannot be compiled.
        """
        self.facts  # noqa: B018
        if self._for_tools:
            self._for_tools.checked()
        return self

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = DEFAULTS) -> str:
        """Returns the prompt, ready for the assistant's answer.

        Raises:
            TemplateRefused: the template raised, or does not fit the messages.
        """
        if self._for_tools and options.tools:
            return self._for_tools.render(messages, options)
        formed = [self.facts.formed(_with_thinking(message)) for message in messages]
        if not options.continue_final_message:
            return self._render(formed, options)
        last, content = _marked(formed[-1])
        return _up_to_mark(self._render([*formed[:-1], last], options), content)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> str:
        try:
            return self._compiled.render(
                {
                    **self._tokens, "documents": None, **self._shape.variables(options.tools, options.variables),
                    "messages": self._shape.messages(messages, options.tools),
                    "add_generation_prompt": options.add_generation_prompt,
                }
            )  # fmt: skip
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any exception
            raise TemplateRefused(_reason(error)) from None


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its thoughts under both names that templates have for them."""
    thoughts = message.get("reasoning_content")
    return message if thoughts is None else {"thinking": thoughts, **message}


def _marked(message: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Returns the message with a mark after its content, and the text before the mark."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + CONTINUED}, content
    last = content[-1]["text"]
    return {**message, "content": [*content[:-1], {**content[-1], "text": last + CONTINUED}]}, last


def _up_to_mark(text: str, content: str) -> str:
    """Returns a prompt without what the template wrote after its last message."""
    end = text.rfind(CONTINUED.strip())
    if end < 0 or content.strip() not in text[:end]:
        raise TemplateRefused("the last message is not in the prompt as it is, so it cannot be continued")
    return text[:end] if text.startswith(CONTINUED, end) else text[:end].rstrip()


def _reason(error: Exception) -> str:
    return str(error)[:MAX_REASON] or type(error).__name__


def render(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: TemplateOptions, most: int
) -> str:  # fmt: skip
    """Returns the prompt.

    Args:
        most: characters.

    Raises:
        TemplateRefused: it is longer, or as `ChatTemplate.render`.
    """
    text = template.render(messages, options)
    if len(text) > most:
        raise TemplateRefused(f"it makes {len(text)} characters of them, and {most} are all that the model may take")
    return text


def render_each(template: bytes, chats: Sequence[bytes], most: int) -> list[str | TemplateRefused]:
    """Returns the prompt of each chat, or why there is none; for a helper process.

    Args:
        template, chats: pickled; a chat is its messages and its options' fields.
    """
    return [_rendered(_unpickled(template), chat, most) for chat in chats]


def _rendered(template: ChatTemplate, chat: bytes, most: int) -> str | TemplateRefused:
    messages, options = pickle.loads(chat)
    try:
        return render(template, messages, TemplateOptions(*options), most)
    except TemplateRefused as error:
        return error


@lru_cache(KEPT_TEMPLATES)
def _unpickled(template: bytes) -> ChatTemplate:
    """Returns one template for all chats of a process: it is compiled once."""
    found = pickle.loads(template)
    assert isinstance(found, ChatTemplate)
    return found


def check(template: ChatTemplate) -> ChatTemplate:
    """Returns the template with its facts; for a helper process. Raises ValueError as `ChatTemplate.checked`."""
    return template.checked()
