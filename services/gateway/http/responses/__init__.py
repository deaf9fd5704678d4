"""OpenAI's Responses, put to the chat endpoint, answered in items and events of their own. The HTTP door may enter."""

from services.gateway.http.responses.reading import RESPONSE, count_input, read_response
from services.gateway.http.responses.routes import KEPT, KEPT_BODIES, KEPT_QUERIES, Respond, kept_routes, names_no_kept
from services.gateway.http.responses.schema import ResponseBody

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
