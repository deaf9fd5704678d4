"""The HTTP door: OpenAI's API over JSON and server-sent events, health, metrics. The gateway's server may enter."""

from services.gateway.http.app import build_app
from services.gateway.http.connections import Room, raise_limit
from services.gateway.http.server import HttpServer

__all__ = ["HttpServer", "Room", "build_app", "raise_limit"]
