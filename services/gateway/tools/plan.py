"""How a request's answers are to be read, which follows from its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.errors import InvalidRequest
from services.gateway.tools.call import CallFormat
from services.gateway.tools.forced import ForcedCalls, NamedCall
from services.gateway.tools.formats.table import FORMATS
from services.gateway.tools.reader import AnswerReader
from services.gateway.tools.request import ToolUse
from services.gateway.tools.thinking import Tags, Thinking


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    tags: Tags | None
    opened: bool  # the prompt ends within thoughts
    calls: type[CallFormat] | None
    use: ToolUse | None
    id_form: str
    written: str = ""  # in a format with messages: the part of the answer's first message that the prompt has

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the detokenizer must show, as they are read."""
        tags = (self.tags.begin, self.tags.end) if self.tags else ()
        return frozenset((*tags, *(self.calls.markers() if self.calls else ())))

    @property
    def thoughts_end(self) -> str:
        """The mark that ends the thoughts within which an answer begins; "" if it begins outside thoughts."""
        return self.tags.end if self.tags and self.opened else ""

    def call_id(self, unique: str) -> str:
        return self.id_form.format(unique)

    def reader(self) -> AnswerReader:
        """Returns a new reader, for one answer."""
        thinking = calls = None
        messages = self.calls is not None and self.calls.messages
        if self.tags and not messages:
            thinking = Thinking(self.tags, self.opened, self.calls.ends_thinking if self.calls else ())
        if self.calls and (self.use or messages):
            calls = self.calls(self.use.schemas if self.use else {})
            calls.feed(self.written)
        return AnswerReader(thinking, calls, 1 if self.use and not self.use.parallel else None)


def plan_reading(
    tags: Tags | None, format_: type[CallFormat] | None, use: ToolUse | None, prompt: str
) -> ReadingPlan | None:
    """Returns the plan for reading answers; None if they are only text.

    Args:
        tags, format_: the model's.

    Raises:
        InvalidRequest: the model's calls could not be read.
    """
    if format_ is not None and format_.messages:
        last = prompt.rfind(format_.messages["start"])
        return ReadingPlan(tags, False, format_, use, format_.id_form, prompt[last:] if last >= 0 else "")
    if use is None and tags is None:
        return None
    calls = None
    if use is not None:
        forced = NamedCall if use.named else ForcedCalls if use.required else None
        calls = forced or format_
        if calls is None:
            raise InvalidRequest(
                "tools: this model's calls cannot be told from text: its chat template shows no format of calls, and "
                f"tool-parser names none. Start the gateway with --tool-parser and one of {', '.join(FORMATS)}, or let "
                "tool_choice be required or name a function", "tool_choice",
            )  # fmt: skip
    return ReadingPlan(tags, tags is not None and tags.opened_by(prompt), calls, use, (format_ or CallFormat).id_form)
