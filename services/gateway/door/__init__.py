"""The HTTP door: connections, requests' bodies, answers and streams, whichever API they are of. The gateway may enter.

    connection ──> Exchange ──> Endpoint ──(an API reads its body)──> ParsedBody ──> Answer ──(Framing)──> events

What serves is imported when it is asked for: the helper process that reads large bodies needs none of it.
"""

from typing import TYPE_CHECKING

from tandem.lazy import lazily

if TYPE_CHECKING:
    from services.gateway.door.connections import Room, raise_limit
    from services.gateway.door.dialect import OPENAI, RESPONSES, Dialect
    from services.gateway.door.endpoint import (
        ADMIN_BYTES,
        AdminEndpoint,
        Endpoint,
        GenerateEndpoint,
        ReadBody,
        RespondTo,
        TextEndpoint,
    )
    from services.gateway.door.exchange import Exchange, request_id_of
    from services.gateway.door.parsed import CheckTurn, Framing, ParsedBody, Terms, Unstreamed
    from services.gateway.door.server import HttpServer

__all__ = [
    "ADMIN_BYTES",
    "OPENAI",
    "RESPONSES",
    "AdminEndpoint",
    "CheckTurn",
    "Dialect",
    "Endpoint",
    "Exchange",
    "Framing",
    "GenerateEndpoint",
    "HttpServer",
    "ParsedBody",
    "ReadBody",
    "RespondTo",
    "Room",
    "Terms",
    "TextEndpoint",
    "Unstreamed",
    "raise_limit",
    "request_id_of",
]
__getattr__ = lazily(
    __name__,
    {
        "connections": ("Room", "raise_limit"),
        "dialect": ("OPENAI", "RESPONSES", "Dialect"),
        "endpoint": (
            "ADMIN_BYTES", "AdminEndpoint", "Endpoint", "GenerateEndpoint", "ReadBody", "RespondTo", "TextEndpoint"
        ),
        "exchange": ("Exchange", "request_id_of"),
        "parsed": ("CheckTurn", "Framing", "ParsedBody", "Terms", "Unstreamed"),
        "server": ("HttpServer",),
    },
)  # fmt: skip
