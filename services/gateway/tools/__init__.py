"""Answers with tool calls and thoughts: splits text into content, thoughts and calls. The gateway may enter.

    text -> Thinking -> CallReader of the model's format -> Reading
            <think>     <tool_call>, [TOOL_CALLS], ...     gpt-oss' thoughts are in its format

Each format reads text as it comes, cut anywhere: a call in parts, as far as they are certain, and whole once it is
complete. One that was cut off is none.
"""

from services.gateway.tools.call import Call, CallFormat, CallPart, CallReader, Schemas, joined_parts, parsed
from services.gateway.tools.custom import OnlyString, text_function
from services.gateway.tools.formats.table import FORMATS, detect_format
from services.gateway.tools.plan import ReadingPlan, plan_reading
from services.gateway.tools.reader import AnswerReader, Reading
from services.gateway.tools.request import MAX_TOOLS, ToolUse, past_arguments, read_call, read_tools
from services.gateway.tools.thinking import TAGS, Tags, Thinking, detect_tags

__all__ = [
    "FORMATS",
    "MAX_TOOLS",
    "TAGS",
    "AnswerReader",
    "Call",
    "CallFormat",
    "CallPart",
    "CallReader",
    "OnlyString",
    "Reading",
    "ReadingPlan",
    "Schemas",
    "Tags",
    "Thinking",
    "ToolUse",
    "detect_format",
    "detect_tags",
    "joined_parts",
    "parsed",
    "past_arguments",
    "plan_reading",
    "read_call",
    "read_tools",
    "text_function",
]
