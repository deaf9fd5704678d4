"""Pages for browsers: the API's description at /docs, by files of this machine, and a redirect from / to it."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

FILES = "docs/files"


def add_pages(app: FastAPI) -> None:
    app.mount(f"/{FILES}", StaticFiles(directory=str(files("fastapi_swagger") / "resources")))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("docs")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Returns the page. Its links are relative, so that they hold behind a proxy's path."""
        return get_swagger_ui_html(
            openapi_url="./openapi.json", title=app.title, swagger_js_url=f"{FILES}/swagger-ui-bundle.js",
            swagger_css_url=f"{FILES}/swagger-ui.css", swagger_favicon_url=f"{FILES}/favicon-32x32.png",
            swagger_ui_parameters={"validatorUrl": None},
        )  # fmt: skip
