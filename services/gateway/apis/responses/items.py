"""The items of a response's output, each with the events that it makes while it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from services.gateway.apis.responses.tools import Tool
from services.gateway.tools import OnlyString

# The kind of an event without `response.`, and its fields.
Said = tuple[str, Mapping[str, Any]]


class Item(ABC):
    prefix: ClassVar[str]  # of its ids
    runs_on = False  # useless before its end

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.status = "in_progress"
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def begin(self) -> Sequence[Said]:
        """Returns the events after that of the empty item."""
        return ()

    @abstractmethod
    def grow(self, text: str) -> Sequence[Said]: ...

    @abstractmethod
    def end(self) -> Sequence[Said]:
        """Returns the events before that of the whole item."""

    @abstractmethod
    def json(self) -> dict[str, Any]: ...

    def empty(self) -> dict[str, Any]:
        return self.json()


class TextItem(Item):
    """An item of text in one part."""

    event: ClassVar[str]
    beside: ClassVar[Mapping[str, Any]] = {}  # further fields of its events

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]: ...

    def begin(self) -> Sequence[Said]:
        return [("content_part.added", {"content_index": 0, "part": self.part("")})]

    def grow(self, text: str) -> Sequence[Said]:
        self.texts.append(text)
        return [(f"{self.event}.delta", {"content_index": 0, "delta": text, **self.beside})]

    def end(self) -> Sequence[Said]:
        text = self.text
        done = {"content_index": 0, "text": text, **self.beside}
        return [(f"{self.event}.done", done), ("content_part.done", {"content_index": 0, "part": self.part(text)})]

    def empty(self) -> dict[str, Any]:
        return {**self.json(), "content": []}


class Message(TextItem):
    prefix, event = "msg", "output_text"
    beside: ClassVar[Mapping[str, Any]] = {"logprobs": []}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def json(self) -> dict[str, Any]:
        said = {"type": "message", "id": self.id, "status": self.status, "role": "assistant"}
        return {**said, "content": [self.part(self.text)]}


class Thoughts(TextItem):
    prefix, event = "rs", "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def json(self) -> dict[str, Any]:
        said = {"type": "reasoning", "id": self.id, "status": self.status, "summary": []}
        return {**said, "content": [self.part(self.text)]}


class ToolCall(Item):
    """A tool call. A call that was cut off is left out, as no client should run half of it."""

    kind: ClassVar[str]
    runs_on = True

    def __init__(self, item_id: str, call_id: str, index: int, name: str, namespace: str | None) -> None:
        super().__init__(item_id)
        self.index = index  # index among the answer's calls
        self._said = {"call_id": call_id, "name": name} | ({"namespace": namespace} if namespace else {})

    def json(self) -> dict[str, Any]:
        return {"type": self.kind, "id": self.id, "status": self.status, **self._said, **self._content()}

    @abstractmethod
    def _content(self) -> dict[str, Any]: ...


class FunctionCall(ToolCall):
    prefix, kind = "fc", "function_call"

    def grow(self, text: str) -> Sequence[Said]:
        self.texts.append(text)
        return [("function_call_arguments.delta", {"delta": text})] if text else []

    def end(self) -> Sequence[Said]:
        return [("function_call_arguments.done", {"name": self._said["name"], **self._content()})]

    def _content(self) -> dict[str, Any]:
        return {"arguments": self.text}


class CustomCall(ToolCall):
    """A custom tool's call: its input is the one argument, or the whole text if it has no such argument."""

    prefix, kind = "ctc", "custom_tool_call"

    def __init__(self, item_id: str, call_id: str, index: int, name: str, namespace: str | None) -> None:
        super().__init__(item_id, call_id, index, name, namespace)
        self._argument = OnlyString()

    def grow(self, text: str) -> Sequence[Said]:
        return self._grown(self._argument.feed(text))

    def end(self) -> Sequence[Said]:
        rest = self._grown(self._argument.rest())
        return [*rest, ("custom_tool_call_input.done", self._content())]

    def _grown(self, text: str) -> Sequence[Said]:
        self.texts.append(text)
        return [("custom_tool_call_input.delta", {"delta": text})] if text else []

    def _content(self) -> dict[str, Any]:
        return {"input": self.text}


def item_of_call(tool: Tool | None, item_id: str, call_id: str, index: int, name: str) -> ToolCall:
    """Returns the item of a call; a tool that was not offered keeps the name that the model wrote."""
    if tool is None:
        return FunctionCall(f"fc_{item_id}", call_id, index, name, None)
    kind = CustomCall if tool.kind == "custom" else FunctionCall
    return kind(f"{kind.prefix}_{item_id}", call_id, index, tool.name, tool.namespace)
