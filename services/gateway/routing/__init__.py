"""Routing: the pair of workers for a prompt and its answer, with or without Redis. The gateway may enter."""

from services.gateway.routing.route_request import RouteRequest
from services.gateway.routing.router import Router

__all__ = ["RouteRequest", "Router"]
