"""The console at /console: a page without a build step, and its feed. The gateway may enter."""

from services.gateway.console.console import Console
from services.gateway.console.routes import add_console

__all__ = ["Console", "add_console"]
