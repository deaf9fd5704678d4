"""Bodies of requests: how each API reads its own, what is too much, and large ones apart. The gateway may enter.

A large body, besides its prompts, may say no more than a small one.
"""

from services.gateway.bodies.bounds import (
    LARGE,
    MANY,
    MOST_BESIDE,
    PromptBounds,
    has_many,
    is_large,
    small,
    truncated,
)
from services.gateway.bodies.large import MODULES, LargeBodies
from services.gateway.bodies.reader import BodyReader, ChatPrompt, Incoming, Prompt, Reduced, renderable, rendered

__all__ = [
    "LARGE",
    "MANY",
    "MODULES",
    "MOST_BESIDE",
    "BodyReader",
    "ChatPrompt",
    "Incoming",
    "LargeBodies",
    "Prompt",
    "PromptBounds",
    "Reduced",
    "has_many",
    "is_large",
    "renderable",
    "rendered",
    "small",
    "truncated",
]
