"""Granite 3: <|tool_call|>[{"name": "f", "arguments": {...}}], in some as <tool_call>. Granite 4 writes as Hermes."""

from __future__ import annotations

from services.gateway.tools.formats.listed import ListedCalls


class Granite(ListedCalls):
    begins = ("<|tool_call|>", "<tool_call>")
    closers = ("</tool_call>",)
    bare = True
