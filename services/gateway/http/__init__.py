"""The HTTP door: OpenAI's API over JSON and server-sent events, health, metrics. The gateway's server may enter.

What serves is imported when it is asked for: the helper process that reads large bodies needs none of it.
"""

from typing import TYPE_CHECKING

from tandem.lazy import lazily

if TYPE_CHECKING:
    from services.gateway.http.app import build_app
    from services.gateway.http.connections import Room, raise_limit
    from services.gateway.http.server import HttpServer

__all__ = ["HttpServer", "Room", "build_app", "raise_limit"]
__getattr__ = lazily(
    __name__, {"app": ("build_app",), "connections": ("Room", "raise_limit"), "server": ("HttpServer",)}
)
