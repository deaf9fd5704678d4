"""Text in, token ids out, and back: the only folder that knows what a token says. The gateway may enter.

chat messages -> ChatTemplate -> text -> Tokenizer -> token ids
token ids -> Detokenizer -> text -> StopStrings -> the client
"""

from services.gateway.text.batches import Batches
from services.gateway.text.chat_template import ROLES, ChatTemplate, TemplateOptions, TemplateRefused
from services.gateway.text.checked_ids import CheckedIds
from services.gateway.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from services.gateway.text.parts import LIMITS as PARTS_LIMITS
from services.gateway.text.parts import SMALL_BYTES, TokenizerParts, parts_of
from services.gateway.text.stop import StopStrings
from services.gateway.text.tokenizer import MOST_TOKENS, Tokenizer, TooManyTokens

__all__ = [
    "MOST_TOKENS",
    "PARTS_LIMITS",
    "ROLES",
    "SMALL_BYTES",
    "Batches",
    "ByteDetokenizer",
    "ChatTemplate",
    "CheckedIds",
    "Detokenizer",
    "StopStrings",
    "TemplateOptions",
    "TemplateRefused",
    "Tokenizer",
    "TokenizerParts",
    "TooManyTokens",
    "WindowDetokenizer",
    "parts_of",
]
