"""What a response's output is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Item:
    """Text that grows."""

    prefix: ClassVar[str]
    event: ClassVar[str]  # what its events are called
    beside: ClassVar[Mapping[str, Any]] = {}  # what they say besides text

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.status = "in_progress"
        self.texts: list[str] = []

    def part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def json(self, with_content: bool = True) -> dict[str, Any]:
        raise NotImplementedError

    def _content(self, with_content: bool) -> list[dict[str, Any]]:
        return [self.part("".join(self.texts))] if with_content else []


class Message(Item):
    prefix, event = "msg", "output_text"
    beside: ClassVar[Mapping[str, Any]] = {"logprobs": []}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def json(self, with_content: bool = True) -> dict[str, Any]:
        content = self._content(with_content)
        return {"type": "message", "id": self.id, "status": self.status, "role": "assistant", "content": content}


class Thoughts(Item):
    prefix, event = "rs", "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def json(self, with_content: bool = True) -> dict[str, Any]:
        content = self._content(with_content)
        return {"type": "reasoning", "id": self.id, "status": self.status, "summary": [], "content": content}
