"""The HTTP APIs, a folder each, and the app that has them all. The gateway's server may enter.

The app is imported when it is asked for: the helper process that reads large bodies needs none of it.
"""

from typing import TYPE_CHECKING

from tandem.lazy import lazily

if TYPE_CHECKING:
    from services.gateway.apis.app import build_app

__all__ = ["build_app"]
__getattr__ = lazily(__name__, {"app": ("build_app",)})
