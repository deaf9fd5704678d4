"""Bodies of requests: a reader for each API, bounds, and large bodies read in a helper. The gateway may enter.

Besides its prompts a large body may have no more than a small one.
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
