"""Probes of a chat template: renders some messages to see which it shows, and in which form.

system message     shown first? shown where it stands behind others?
content            as text, as a list of parts, or either: templates of models that see pictures may want parts
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = "Callable[[Sequence[Message]], str | None]"  # None if the template refuses the messages
Form = Literal["text", "parts", "either"]
FIRST, SECOND = "message one", "message two"
# Text of parts that a template printed as a Python or JSON object, which does not count as shown.
SERIALIZED = re.compile(rf"""["']text["']:\s*["'](?:{FIRST}|{SECOND})""")
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "probe", "arguments": {}}}
# Messages before and after the examined one, by its role.
AROUND: Mapping[str, tuple[Sequence[Message], Sequence[Message]]] = {
    "user": ((), ()),
    "assistant": (({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},)),
    "system": ((), ({"role": "user", "content": "a"},)),
    "tool": (
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        (),
    ),
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Facts about what a template does with messages.

    Args:
        forms: what it wants content to be, by role; text where it is not said.
        takes_system: it shows a system message; some templates refuse one, some leave it out.
        takes_late_system: it shows a system message where it stands, also behind others.
    """

    forms: tuple[tuple[str, Form], ...] = ()
    takes_system: bool = True
    takes_late_system: bool = True

    def formed(self, message: Message) -> Message:
        """Returns the message, its content as the template wants it."""
        content, form = message.get("content"), dict(self.forms).get(message["role"], "text")
        if isinstance(content, str) and form == "parts":
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and form == "text":
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message


def probe(render: Render) -> TemplateFacts:
    """
    Args:
        render: renders messages as they are.
    """
    forms: tuple[tuple[str, Form], ...] = ()
    for role in AROUND:
        forms += ((role, _form(render, role, TemplateFacts(forms))),)
    facts = TemplateFacts(forms)

    def shows(roles: Sequence[str]) -> bool:
        marks = [f"message {i}" for i in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        return _in_order(render([facts.formed(message) for message in messages]), marks)

    return TemplateFacts(
        forms,
        takes_system=shows(["system", "user"]),
        takes_late_system=shows(["user", "system", "assistant", "user", "system"]),
    )


def _form(render: Render, role: str, known: TemplateFacts) -> Form:
    before, behind = (list(map(known.formed, messages)) for messages in AROUND[role])

    def shown(content: Any, marks: Sequence[str]) -> bool:
        message = {"role": role, "content": content, **({"tool_call_id": CALL["id"]} if role == "tool" else {})}
        text = render([*before, message, *behind])
        return _in_order(text, marks) and not SERIALIZED.search(text or "")

    text = shown(FIRST, [FIRST])
    parts = shown([{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}], [FIRST, SECOND])
    if parts:
        return "either" if text else "parts"
    return "text"


def _in_order(text: str | None, marks: Sequence[str]) -> bool:
    places = [text.find(mark) for mark in marks] if text is not None else [-1]
    return places[0] >= 0 and places == sorted(places)
