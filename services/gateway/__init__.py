"""The gateway room: text and HTTP or gRPC on one side, token ids and workers on the other. `tandem up` may enter.

No torch. Each process imports what it uses: settings come without the web's libraries, helper processes with less.
"""

from typing import TYPE_CHECKING

from tandem.lazy import lazily

if TYPE_CHECKING:
    from services.gateway.server import Gateway
    from services.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
__getattr__ = lazily(__name__, {"server": ("Gateway",), "settings": ("GatewaySettings",)})
