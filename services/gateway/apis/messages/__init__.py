"""Anthropic's Messages API: a body becomes a chat, and the chat's answer its events. The app may enter.

MessagesBody -> ChatRequest -> pipeline -> deltas -> MessageFrame: a message, or message_start ... message_stop
"""

from services.gateway.apis.messages.errors import Anthropic
from services.gateway.apis.messages.routes import COUNTED, MESSAGES, count_tokens, read_messages_body
from services.gateway.apis.messages.schema import CountTokensBody, MessagesBody

__all__ = [
    "COUNTED",
    "MESSAGES",
    "Anthropic",
    "CountTokensBody",
    "MessagesBody",
    "count_tokens",
    "read_messages_body",
]
