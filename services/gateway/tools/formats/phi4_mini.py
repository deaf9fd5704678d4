"""Phi-4-mini: <|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>, or one object for the list."""

from __future__ import annotations

from services.gateway.tools.formats.listed import ListedCalls


class Phi4Mini(ListedCalls):
    begins = ("<|tool_call|>",)
    closers = ("<|/tool_call|>",)
    bare = True
