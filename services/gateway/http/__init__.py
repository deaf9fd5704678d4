"""The HTTP door: OpenAI's API over JSON and server-sent events, health, metrics."""

from services.gateway.http.app import build_app
from services.gateway.http.server import HttpServer

__all__ = ["HttpServer", "build_app"]
