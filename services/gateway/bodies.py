"""Bodies that would hold up the event loop: parsed, checked and bounded in a helper process.

    small ──────────────────────────────────────────────────────────────────────> read where it came
    large ──> helper: fields checked, prompts bounded, messages rendered ──> small fields, prompts as bytes ──> likewise

Parsing holds the interpreter's lock, so a thread would free nothing. What comes back from the helper is bounded by
what the model's context takes; besides its prompt, a large body may say no more than a small one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.gateway.errors import InvalidRequest, Overloaded
from services.gateway.returns import Returns
from services.gateway.text import CheckedIds
from services.gateway.untrusted import ChatTemplate, TemplateOptions, TemplateRefused, render
from tandem.containment import Bounds, CallFailed, Sandbox, SandboxBusy

LARGE = 256 * 1024  # bytes
MANY = 20_000  # values
MOST_BESIDE = 2**20  # bytes of a large body besides its prompt: a schema or grammar may be long
TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
# What a helper imports before its first body.
MODULES = (
    "services.gateway.http.large", "services.gateway.http.messages", "services.gateway.http.responses",
    "services.gateway.grpc.large_messages",
)  # fmt: skip
LIMITS = Bounds(cpu_s=6.0, wall_s=20.0, memory_bytes=2**30)
# Of bodies that are in the helper or wait for it.
MOST_WAITING_BYTES = 256 * 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """The most that a model takes, and a gateway for it."""

    prompts: int
    tokens: int
    characters: int
    vocab_size: int

    def check_characters(self, length: int, param: str) -> None:
        """Before it is tokenized: that takes a second for each half a million characters.

        Raises:
            InvalidRequest
        """
        if length > self.characters:
            raise InvalidRequest(
                f"this model's maximum context length is {self.tokens} tokens, at most {self.characters} characters, "
                f"but {param} has {length}", param, "context_length_exceeded",
            )  # fmt: skip

    def check_choices(self, prompts: int, n: int) -> None:
        """
        Raises:
            InvalidRequest: more answers in one request than the gateway allows.
        """
        if prompts * n > self.prompts:
            raise InvalidRequest(f"n: at most {self.prompts} choices, got {prompts * n}", "n")

    def check_tokens(self, count: int, param: str) -> None:
        """
        Raises:
            InvalidRequest
        """
        if count > self.tokens:
            raise InvalidRequest(
                f"this model's maximum context length is {self.tokens} tokens, but {param} has {count}",
                param, "context_length_exceeded",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Incoming:
    """A body to be read.

    `prompts`: what a helper has taken out of its `fields`, token ids as four bytes each; `items`: those of a response,
    as it has read them; `owner`: whose it is, by its headers alone.
    """

    fields: bytes
    prompts: Sequence[str | bytes] | None = None
    items: bytes | None = None
    owner: str = ""

    def checked(self) -> list[str | CheckedIds]:
        """The prompts that a helper has taken out of the body."""
        return [one if isinstance(one, str) else CheckedIds.of(one) for one in self.prompts or ()]

    @property
    def text(self) -> str | None:
        """The one prompt, where there are only texts; None where it is still among the fields."""
        if self.prompts is None:
            return None
        (text,) = self.prompts
        assert isinstance(text, str)
        return text


Reduce = Callable[[bytes, PromptBounds, ChatTemplate | None], Incoming]


def is_large(body: bytes) -> bool:
    return len(body) > LARGE or has_many(body)


def has_many(body: bytes) -> bool:
    """More values than are parsed in a few milliseconds. What looks like one within a text counts, too."""
    return len(body) > MANY and sum(map(body.count, (b"[", b"{", b","))) > MANY


def small(fields: bytes, prompt: str) -> bytes:
    """
    Raises:
        InvalidRequest: what is there besides the prompt is large, too.
    """
    if len(fields) > MOST_BESIDE or has_many(TEXT.sub(b"", fields)):
        said = f"besides {prompt} the body must not have more than {MOST_BESIDE} bytes or {MANY} values"
        raise InvalidRequest(said, code="body_too_large")
    return fields


def rendered(
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
    template: ChatTemplate | None,
    bounds: PromptBounds,
) -> str:
    """Renders messages, in a helper process that has the whole body.

    Raises:
        InvalidRequest: the model has no chat template, its template refuses these messages, or they are too long.
    """
    try:
        return render(renderable(messages, options, template, bounds), messages, options, bounds.characters)
    except TemplateRefused as error:
        raise InvalidRequest(f"messages: the model's chat template refuses them: {error}", "messages") from None


def renderable(
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
    template: ChatTemplate | None,
    bounds: PromptBounds,
) -> ChatTemplate:
    """Returns the template, if these messages may be rendered at all.

    Raises:
        InvalidRequest: as `rendered`.
    """
    if options.continue_final_message and options.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    bounds.check_characters(sum(_length(message["content"]) for message in messages), "messages")
    if template is None:
        raise InvalidRequest("the model has no chat template", "messages")
    return template


def _length(content: str | Sequence[Mapping[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


class LargeBodies:
    """The maker of the sandbox runs it; without one, in a simulation, nothing is kept apart."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._returns = Returns()
        self._num_bytes = self._num_read = 0  # that are there, and that were read since there have been any
        self._since = 0.0  # when these came, on the event loop's clock

    async def read(self, function: Callable[..., T], body: bytes, *others: object, caller: str) -> T:
        """Run the function over the body in the helper process; returns what it makes of it. Callers take turns.

        Raises:
            GatewayError: the function's own; or the body is of more than it may be, or the helper has too many.
        """
        if self._sandbox is None:
            return function(body, *others)
        if self._num_bytes + len(body) > MOST_WAITING_BYTES:
            raise self._busy("too many large bodies wait to be read", body)
        if not self._num_bytes:
            self._num_read, self._since = 0, asyncio.get_running_loop().time()
        self._num_bytes += len(body)
        try:
            return await self._sandbox.call(function, body, *others, caller=caller, bounds=LIMITS)
        except SandboxBusy as error:
            raise self._busy(f"the body could not be read now: {error}", body) from None
        except CallFailed as error:
            raise InvalidRequest(f"the body cannot be read: {error}", code="body_too_complex") from None
        finally:
            self._num_bytes -= len(body)
            self._num_read += len(body)

    def _busy(self, said: str, body: bytes) -> Overloaded:
        """It says to come again when as much as this body has was read."""
        now = asyncio.get_running_loop().time()
        each_s = len(body) * (now - self._since) / self._num_read if self._num_read else 1.0
        return Overloaded(said, "too_many_bodies", self._returns.wait_s(each_s, each_s, now))
