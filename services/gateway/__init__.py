"""The gateway room: text and HTTP or gRPC on one side, token ids and workers on the other. `tandem up` may enter.

No torch. Settings are there without the web's libraries, for those who only check them.
"""

from typing import TYPE_CHECKING

from services.gateway.settings import GatewaySettings
from tandem.lazy import lazily

if TYPE_CHECKING:
    from services.gateway.server import Gateway

__all__ = ["Gateway", "GatewaySettings"]
__getattr__ = lazily(__name__, {"server": ("Gateway",)})
