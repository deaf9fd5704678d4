"""The form of a chat completion: its whole message, and its chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.gateway.apis.openai.envelope import Format, Made, Name
from services.gateway.generation import Delta
from services.gateway.text import Tokenizer
from services.gateway.tools import Call, CallPart, OnlyString
from tandem.v1 import llm_pb2


class ChatFormat(Format):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_logprobs_in_choice = False

    def __init__(
        self, tokenizer: Tokenizer, name: Name, new_call_id: Callable[[], str], with_reasoning: bool,
        custom: frozenset[str],
    ) -> None:  # fmt: skip
        """`custom`: names of the custom tools."""
        self._tokenizer, self._name = tokenizer, name
        self._new_call_id = new_call_id
        self._with_reasoning = with_reasoning
        self._custom = custom
        self._inputs: dict[tuple[int, int], OnlyString] = {}  # inputs of custom tools' calls, by choice and index
        self._begun: set[int] = set()

    def delta(self, delta: Delta, made: Made) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text, **self._reasoning(delta)}
        if calls := self._call_parts(delta):
            said["tool_calls"] = calls
        if not delta.text and (len(said) > 1 or (delta.finish_reason and delta.choice in self._begun)):
            del said["content"]
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            said = {"role": "assistant", **said}
        return {"delta": said, "logprobs": self._logprobs(delta, made)}

    def choice(self, delta: Delta, made: Made) -> dict[str, Any]:
        calls = [self._whole_call(call) for call in delta.calls]
        text = None if calls and not delta.text else delta.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **self._reasoning(delta)}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(delta, made)}

    def _reasoning(self, delta: Delta) -> dict[str, str]:
        """Returns the thoughts under their present name and the one that older clients know."""
        if not delta.reasoning or not self._with_reasoning:
            return {}
        return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}

    def _whole_call(self, call: Call) -> dict[str, Any]:
        if call.name not in self._custom:
            return self._call(call, "function")
        return self._call(replace(call, arguments=OnlyString().feed(call.arguments)), "custom")

    def _call_parts(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        for part in delta.call_parts:
            key = delta.choice, part.index
            if part.name in self._custom:
                self._inputs[key] = OnlyString()
            kind, arguments = "function", part.arguments
            if (text := self._inputs.get(key)) is not None:
                kind, arguments = "custom", text.feed(arguments)
            if part.name or arguments:
                said = self._call(replace(part, arguments=arguments), kind)
                found.append({"index": part.index, **said})
        return found

    def _call(self, said: Call | CallPart, kind: str) -> dict[str, Any]:
        """Returns a call, or a part of one; id and name only in its first part."""
        text = {"input" if kind == "custom" else "arguments": said.arguments}
        if not said.name:
            return {kind: text}
        return {"id": self._new_call_id(), "type": kind, kind: {"name": said.name, **text}}

    def logprobs(self, delta: Delta) -> Made:
        """Returns the logprobs of shown tokens: one that silently ends an answer is not part of it."""
        if not delta.tokens.logprobs:
            return {}
        shown = delta.tokens.logprobs[:-1] if delta.ends_silently else delta.tokens.logprobs
        return {"content": map(self._entries, shown)}

    def _logprobs(self, delta: Delta, made: Made) -> dict[str, Any] | None:
        lists = self.logprobs(delta)
        return {"content": made.get("content") or list(lists["content"]), "refusal": None} if lists else None

    def _entries(self, one: llm_pb2.TokenLogprobs) -> dict[str, Any]:
        """Returns the entry of a token with the likeliest tokens in its place."""
        likeliest = [self._entry(top.token_id, top.logprob) for top in one.top]
        return {**self._entry(one.token_id, one.logprob), "top_logprobs": likeliest}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self._name(token_id), "logprob": logprob, "bytes": list(data)}
