"""A chat in the gateway's own terms, whichever API's body it was. All APIs may enter.

body ──(an API's reader)──> turns, tools, form, thinking = ChatRequest ──> prepare: rendered, tokenized ──> PreparedChat
"""

from services.gateway.chat.chat import ChatRequest, PreparedChat, prepare
from services.gateway.chat.content import text_parts
from services.gateway.chat.naming import named_as
from services.gateway.chat.results import result_text, text_in
from services.gateway.chat.turns import MergedTurns, Turn, call

__all__ = [
    "ChatRequest",
    "MergedTurns",
    "PreparedChat",
    "Turn",
    "call",
    "named_as",
    "prepare",
    "result_text",
    "text_in",
    "text_parts",
]
