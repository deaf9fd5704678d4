"""The gateway room: text and HTTP or gRPC on one side, token ids and workers on the other. No torch."""

from services.gateway.server import Gateway
from services.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
