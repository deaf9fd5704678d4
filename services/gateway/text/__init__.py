"""Text to token ids and back: the only folder that knows the text of a token. The gateway may enter.

text -> Tokenizer -> token ids
token ids -> Detokenizer -> text -> StopStrings -> the client
"""

from services.gateway.text.batches import Batches, UnreadText
from services.gateway.text.checked_ids import CheckedIds
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop import StopStrings
from services.gateway.text.tokenizer import MOST_TOKENS, Tokenizer, TooManyTokens

__all__ = [
    "MOST_TOKENS",
    "Batches",
    "CheckedIds",
    "Detokenizer",
    "StopStrings",
    "Tokenizer",
    "TooManyTokens",
    "UnreadText",
]
