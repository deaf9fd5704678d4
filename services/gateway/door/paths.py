"""Requests that stand for another: paths with a slash too many, and HEAD where only GET is served."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The ids after it are the clients' own and may contain slashes.
TRACES = "/debug/traces/"
# Pages whose links are relative to their path.
PAGES = frozenset(("/docs", "/console"))


def has_more_slashes(path: str) -> bool:
    """Returns True if a slash of the path could be left out."""
    return "//" in path or (path[-1:] == "/" and path != "/")


def without_more_slashes(scope: Scope) -> Scope:
    """Returns the request with the path that its client meant.

    A redirect would lose a POST's body and, behind a proxy that ends TLS, name the wrong scheme.
    """
    path: str = scope["path"]
    before, traces, name = path.partition(TRACES)
    if traces and not before.strip("/"):
        return {**scope, "path": traces + name}
    return {**scope, "path": "/" + "/".join(filter(None, path.split("/")))}


async def show_page(path: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Redirect a browser from a page's path with a trailing slash to the page."""
    await RedirectResponse(f"..{path}")(scope, receive, send)


async def answer_head(app: ASGIApp, routes: list[BaseRoute], scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD as GET without a body, where the route does not do so itself."""

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    if not any(route.matches(scope)[0] is Match.FULL for route in routes):
        scope = {**scope, "method": "GET"}
    await app(scope, receive, send_head)
