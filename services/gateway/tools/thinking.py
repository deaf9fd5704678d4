"""Thoughts before an answer: <think>...</think>, [THINK]...[/THINK]; Granite 3.3 adds <response>...</response>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.tools.call import begun, may_begin


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks around thoughts."""

    begin: str
    end: str
    around: tuple[str, str] = ("", "")  # marks around the answer after thoughts; not shown

    def opened_by(self, prompt: str) -> bool:
        """True if a prompt's end is already within thoughts."""
        return prompt.rstrip().endswith(self.begin)


# By name for --reasoning-parser.
TAGS = {
    "granite": Tags("<think>", "</think>", around=("<response>", "</response>")),
    "think": Tags("<think>", "</think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "harmony": Tags("<|channel|>analysis<|message|>", "<|end|>"),
    "granite_3_2": Tags("Here is my thought process:", "Here is my response:"),
}


def detect_tags(template: str) -> str | None:
    """Returns the name of a template's tags. Both marks are tried, as "<|end|>" is in other templates, too."""
    for name, tags in TAGS.items():
        shown = tags.begin in template or (tags.end in template and tags.end != "<|end|>")
        if shown and tags.around[0] in template:
            return name
    return None


class Thinking:
    """Splits one answer into thoughts and text, dropping white space around thoughts."""

    def __init__(self, tags: Tags, opened: bool, ends: Sequence[str]) -> None:
        """
        Args:
            opened: the prompt ends within thoughts.
            ends: other marks that end thoughts.
        """
        self._tags = tags
        self._ends = (tags.end, *ends)
        self._held = ""
        self._state = "thinking" if opened else "before"
        self._begun = False
        self._answer = _Unwrapped(*tags.around) if tags.around[0] else None
        self.seen = opened

    @property
    def within(self) -> bool:
        return self._state == "thinking"

    def feed(self, text: str) -> tuple[str, str]:
        """Returns the thoughts and the text that are certain now."""
        self._held += text
        if self._state == "before":
            self._look_for_begin()
        thoughts = self._thoughts() if self._state == "thinking" else ""
        if self._state != "after":
            return thoughts, ""
        rest, self._held = self._held, ""
        return thoughts, self._answer.feed(rest) if self._answer and self.seen else rest

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._state == "after" and self._answer:
            return "", self._answer.finish()
        return (self._shown(held.rstrip()), "") if self._state == "thinking" else ("", held)

    def _look_for_begin(self) -> None:
        said = self._held.lstrip()
        begin = self._tags.begin
        if said.startswith(begin):
            self._held, self._state, self.seen = said[len(begin) :], "thinking", True
        elif not begin.startswith(said):
            self._state = "after"

    def _thoughts(self) -> str:
        text = self._held
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if found:
            at, end = min(found)
            self._state = "after"
            self._held = text[at + len(end) :] if end == self._tags.end else text[at:]
            return self._shown(text[:at].rstrip())
        certain = text[: len(text) - may_begin(text, self._ends)].rstrip()
        self._held = text[len(certain) :]
        return self._shown(certain)

    def _shown(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text


class _Unwrapped:
    """Removes the marks around an answer."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._held = begin, ""
        self._may_end = re.compile(rf"(?:{re.escape(end)}\s*|{begun(end)})$")
        self._end = re.compile(rf"{re.escape(end)}\s*$")
        self._entered = False

    def feed(self, text: str) -> str:
        self._held += text
        if not self._entered:
            said = self._held.lstrip()
            if self._begin.startswith(said) and said != self._begin:
                return ""
            self._entered = True
            self._held = said.removeprefix(self._begin) if said.startswith(self._begin) else self._held
        return self._take(self._may_end)

    def finish(self) -> str:
        return self._take(self._end) if self._entered else self._held

    def _take(self, end: re.Pattern[str]) -> str:
        found = end.search(self._held)
        shown = self._held[: found.start()] if found else self._held
        self._held = self._held[len(shown) :]
        return shown
