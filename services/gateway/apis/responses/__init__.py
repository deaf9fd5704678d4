"""OpenAI's Responses, put to the chat endpoint, answered in items and events of their own. The app may enter."""

from services.gateway.apis.responses.kept.routes import (
    KEPT,
    KEPT_BODIES,
    KEPT_QUERIES,
    Respond,
    kept_routes,
    names_no_kept,
)
from services.gateway.apis.responses.reading import RESPONSE, count_input, read_response
from services.gateway.apis.responses.schema import ResponseBody

__all__ = [
    "KEPT",
    "KEPT_BODIES",
    "KEPT_QUERIES",
    "RESPONSE",
    "Respond",
    "ResponseBody",
    "count_input",
    "kept_routes",
    "names_no_kept",
    "read_response",
]
