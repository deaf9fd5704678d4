"""Untrusted code of models: chat templates and tokenizers. The gateway may enter.

A template is a program, and a tokenizer's patterns may never end. Helper processes run them, and import only this
room of the gateway.
"""

from services.gateway.untrusted.chat_template import (
    DEFAULTS,
    ROLES,
    ChatTemplate,
    TemplateOptions,
    TemplateRefused,
    check,
    render,
    render_each,
)
from services.gateway.untrusted.tokenizer_parts import LIMITS as PARTS_LIMITS
from services.gateway.untrusted.tokenizer_parts import SMALL_BYTES, TokenizerParts, check_tokenizer, parts_of

__all__ = [
    "DEFAULTS",
    "PARTS_LIMITS",
    "ROLES",
    "SMALL_BYTES",
    "ChatTemplate",
    "TemplateOptions",
    "TemplateRefused",
    "TokenizerParts",
    "check",
    "check_tokenizer",
    "parts_of",
    "render",
    "render_each",
]
