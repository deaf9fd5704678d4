"""Readers of bodies, one for each API: on the loop, or in a helper process for those that are large.

small ──> parse ──> body ──> prompts
large ──> parse, prompts bounded and rendered, the rest dumped ──> parse ──> body, with the prompts beside it
          (in a helper process)                                   (on the loop)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from services.gateway.bodies.bounds import PromptBounds
from services.gateway.errors import InvalidRequest
from services.gateway.text import CheckedIds
from services.gateway.untrusted import ChatTemplate, TemplateOptions, TemplateRefused, render

B = TypeVar("B")
Prompt: TypeAlias = "str | Sequence[int]"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat that is to be rendered: messages as templates want them, and options."""

    messages: Sequence[Mapping[str, Any]]
    options: TemplateOptions


@dataclass(frozen=True, slots=True)
class Reduced:
    """A large body, as a helper process has reduced it.

    `fields`: the body without its prompts; `prompts`: texts, or token ids of four bytes each; `items`: the items of a
    Responses body, as the client sent them.
    """

    fields: bytes
    prompts: Sequence[str | bytes]
    items: bytes | None = None

    @property
    def text(self) -> str:
        """The chat as a helper process has rendered it."""
        (text,) = self.prompts
        assert isinstance(text, str)
        return text


class BodyReader(ABC, Generic[B]):
    """Reads the bodies of one API. It has no state, for it is pickled to helper processes."""

    @abstractmethod
    def parse(self, data: bytes) -> B:
        """Returns the body with its fields checked. Raises InvalidRequest."""

    @abstractmethod
    def prompts(self, body: B, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt | Sequence[Prompt]:
        """Returns the chat to answer, or the prompts to continue. Raises InvalidRequest."""

    @abstractmethod
    def dump(self, body: B) -> bytes:
        """Returns the body without its prompts, in a form that `parse` reads.

        Raises:
            InvalidRequest: even without them it is large.
        """

    @abstractmethod
    def param(self, body: B) -> str:
        """Returns the name of the field that has the prompts."""

    def reduce(self, data: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Reduced:
        """Returns a large body as small fields and prompts within the model's bounds. Raises InvalidRequest."""
        return self.reduced(self.parse(data), bounds, template)

    def reduced(self, body: B, bounds: PromptBounds, template: ChatTemplate | None) -> Reduced:
        """Raises InvalidRequest."""
        said, param = self.prompts(body, bounds, template), self.param(body)
        if isinstance(said, ChatPrompt):
            return Reduced(self.dump(body), [rendered(said, template, bounds)])
        return Reduced(self.dump(body), [_bounded(prompt, bounds, param) for prompt in said])


@dataclass(slots=True)
class Incoming(Generic[B]):
    """A body that is being read. `owner`: its tenant by headers alone; `reduced`: set if the body was large."""

    reader: BodyReader[B]
    body: B
    owner: str = ""
    reduced: Reduced | None = None

    def prompts(self, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt | Sequence[Prompt]:
        """Returns the chat or prompts; a chat that a helper process has rendered is one text. Raises InvalidRequest."""
        if self.reduced is None:
            return self.reader.prompts(self.body, bounds, template)
        return [one if isinstance(one, str) else CheckedIds.of(one) for one in self.reduced.prompts]

    @property
    def text(self) -> str | None:
        """The chat that a helper process has rendered; None where it is still to be rendered."""
        return self.reduced.text if self.reduced else None


def _bounded(prompt: Prompt, bounds: PromptBounds, param: str) -> str | bytes:
    if isinstance(prompt, str):
        bounds.check_characters(len(prompt), param)
        return prompt
    bounds.check_tokens(len(prompt), param)
    bounds.check_ids(prompt, param)
    return array("I", prompt).tobytes()


def rendered(chat: ChatPrompt, template: ChatTemplate | None, bounds: PromptBounds) -> str:
    """Returns the text of a chat. Runs in a process that a template may harm.

    Raises:
        InvalidRequest: the model has no chat template, its template refuses these messages, or they are too long.
    """
    try:
        return render(renderable(chat, template, bounds), chat.messages, chat.options, bounds.characters)
    except TemplateRefused as error:
        raise InvalidRequest(f"messages: the model's chat template refuses them: {error}", "messages") from None


def renderable(chat: ChatPrompt, template: ChatTemplate | None, bounds: PromptBounds) -> ChatTemplate:
    """Returns the template, if this chat may be rendered with it.

    Raises:
        InvalidRequest: as `rendered`.
    """
    if chat.options.continue_final_message and chat.options.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    bounds.check_characters(sum(_length(message["content"]) for message in chat.messages), "messages")
    if template is None:
        raise InvalidRequest("the model has no chat template", "messages")
    return template


def _length(content: str | Sequence[Mapping[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
