"""Renders chats in a helper process, which bounds templates that do not end or want all memory.

A model's templates run on one lane at a time, so that other models' chats have the other lanes.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from services.gateway.bodies import ChatPrompt, PromptBounds, renderable, rendered
from services.gateway.errors import InvalidRequest, Overloaded, Unavailable
from services.gateway.returns import Returns
from services.gateway.untrusted import (
    PARTS_LIMITS,
    ChatTemplate,
    TemplateRefused,
    TokenizerParts,
    check,
    check_tokenizer,
    parts_of,
    render_each,
)
from tandem.containment import Bounds, CallFailed, Sandbox, SandboxBusy

# Chats here take a millisecond to render; large ones arrive rendered by another helper.
LIMITS = Bounds(cpu_s=1.0, wall_s=60.0, memory_bytes=256 * 2**20)
# The most chats, and their bytes, rendered by one call.
MOST_TOGETHER = 64
MOST_BYTES = 2**20
_Waiting: TypeAlias = "tuple[bytes, asyncio.Future[str]]"
A = TypeVar("A")
T = TypeVar("T")
HELPER_MODULES = ("services.gateway.untrusted",)


class ModelHelper:
    """Runs the code of one model's files. Chats that arrive during a call are rendered together by the next one."""

    def __init__(self, sandbox: Sandbox | None, model: str) -> None:
        """
        Args:
            sandbox: None runs everything on the event loop, as in a simulation.
            model: its name and fingerprint.
        """
        self._sandbox, self._model = sandbox, model
        self._template: ChatTemplate | None = None
        self._pickled, self._most = b"", 0
        self._returns = Returns()
        self._waiting = deque[_Waiting]()
        self._suspects = deque[_Waiting]()  # Chats of calls that killed the helper process.
        self._work: asyncio.Task[None] | None = None

    async def checked(self, template: ChatTemplate) -> ChatTemplate:
        """Returns the template, compiled, with its facts.

        Raises:
            ValueError: it cannot be compiled within its bounds.
            Unavailable: the helper process is too busy now.
        """
        return await self._call("chat_template", check, template, bounds=LIMITS)

    async def check_tokenizer(self, file: Path) -> None:
        """
        Raises:
            ValueError: it is malformed, or exceeds its bounds.
            Unavailable: as `checked`.
        """
        await self._call(str(file), check_tokenizer, str(file), bounds=PARTS_LIMITS)

    async def tokenizer_parts(self, file: Path) -> TokenizerParts | None:
        """Returns a tokenizer.json in parts; None if its kind is not divided. Raises as `check_tokenizer`."""
        return await self._call(str(file), parts_of, str(file), bounds=PARTS_LIMITS)

    async def render(self, template: ChatTemplate | None, chat: ChatPrompt, bounds: PromptBounds) -> str:
        """
        Raises:
            InvalidRequest: as `bodies.rendered`, or the template exceeds its bounds for these messages.
            Overloaded: the helper process is too busy now.
        """
        if self._sandbox is None:
            return rendered(chat, template, bounds)
        found, options = renderable(chat, template, bounds), chat.options
        if found is not self._template:
            self._template, self._pickled = found, pickle.dumps(found)
        said = options.add_generation_prompt, options.continue_final_message, options.variables, options.tools
        self._most = bounds.characters
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((pickle.dumps((chat.messages, said)), future))
        if self._work is None:
            self._work = asyncio.create_task(self._render_waiting())
        return await future

    async def _render_waiting(self) -> None:
        """Render until no chat waits. Suspects are rendered alone, alternating with other chats."""
        batch: list[_Waiting] = []
        try:
            while self._waiting or self._suspects:
                batch = self._next_batch()
                await self._render_together(batch)
                if self._suspects:
                    batch = [self._suspects.popleft()]
                    await self._render_together(batch)
        except BaseException as error:
            for _, future in (*batch, *self._waiting, *self._suspects):
                _settle(future, RuntimeError(f"rendering has ended: {error!r}"))
            self._waiting.clear()
            self._suspects.clear()
            raise
        finally:
            self._work = None

    def _next_batch(self) -> list[_Waiting]:
        batch, size = list[_Waiting](), 0
        while self._waiting and len(batch) < MOST_TOGETHER and size < MOST_BYTES:
            chat, future = self._waiting.popleft()
            if not future.done():  # its request may have ended
                batch.append((chat, future))
                size += len(chat)
        return batch

    async def _render_together(self, batch: Sequence[_Waiting]) -> None:
        """Render chats by one call. If the call kills the helper process, all of them become suspects."""
        if all(future.done() for _, future in batch):
            return
        try:
            prompts = await self._call_render([chat for chat, _ in batch])
        except SandboxBusy as error:
            said, now = f"the messages could not be rendered now: {error}", asyncio.get_running_loop().time()
            prompts = [Overloaded(said, "too_many_chats", self._returns.wait_s(0.0, 0.0, now)) for _ in batch]
        except CallFailed as error:
            if len(batch) > 1:
                self._suspects.extend(batch)
                return
            said = f"messages: the model's chat template cannot render them: {error}"
            prompts = [InvalidRequest(said, "messages", "template_failed")]
        for (_, future), prompt in zip(batch, prompts, strict=True):
            _settle(future, prompt)

    async def _call_render(self, chats: Sequence[bytes]) -> Sequence[str | Exception]:
        assert self._sandbox is not None
        return await self._sandbox.call(
            render_each, self._pickled, chats, self._most, caller=self._model, bounds=LIMITS
        )

    async def _call(self, what: str, function: Callable[[A], T], argument: A, bounds: Bounds) -> T:
        if self._sandbox is None:
            return function(argument)
        try:
            return await self._sandbox.call(function, argument, caller=self._model, bounds=bounds)
        except SandboxBusy as error:
            raise Unavailable(f"{what} could not be checked now: {error}", code="model_not_checked") from None
        except CallFailed as error:
            raise ValueError(f"{what}: {error}") from None


def _settle(future: asyncio.Future[str], prompt: str | Exception) -> None:
    if future.done():
        return
    if isinstance(prompt, TemplateRefused):
        prompt = InvalidRequest(f"messages: the model's chat template refuses them: {prompt}", "messages")
    if isinstance(prompt, str):
        future.set_result(prompt)
    else:
        future.set_exception(prompt)
