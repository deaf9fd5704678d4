"""The page, its files and its feed. The page holds no data: it asks for the feed with its viewer's key."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from math import isfinite

from fastapi import FastAPI, Request, Response
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from services.gateway.access import Access
from services.gateway.console.console import Console
from services.gateway.errors import InvalidRequest

FOLDER = files("services.gateway.console") / "page"
NOT_KEPT = {"cache-control": "no-store"}


def add_console(app: FastAPI, access: Access, console: Console) -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    headers = page_headers(page)
    app.mount("/console/files", StaticFiles(directory=str(FOLDER)))

    @app.get("/console", include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @app.get("/console/feed", include_in_schema=False)
    async def feed(request: Request) -> Response:
        """Returns the feed; of charts only points after `after`, if this gateway showed the earlier ones."""
        caller, asked = access.authenticate(request.headers), request.query_params
        told = console.feed(caller, asked.get("gateway", ""), read_time(asked.get("after", "0")))
        return Response(told, media_type="application/json", headers=NOT_KEPT)


def read_time(text: str) -> float:
    """Raises InvalidRequest."""
    try:
        if isfinite(at := float(text)):
            return at
    except ValueError:
        pass
    raise InvalidRequest("after must be a number of seconds, such as a point's `t`", "after")


def page_headers(page: str) -> Mapping[str, str]:
    """Returns headers by which the page may load only this gateway's own files."""
    imports = page.partition('<script type="importmap">')[2].partition("</script>")[0]
    digest = b64encode(sha256(imports.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    safe = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return {"content-security-policy": policy, **safe, "cache-control": "no-cache"}
