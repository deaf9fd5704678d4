"""The FastAPI app. Generation is on plain routes that FastAPI only dispatches to; everything else is ordinary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.gateway.errors import GatewayError
from services.gateway.http.chat import read_chat
from services.gateway.http.completions import read_completion
from services.gateway.http.endpoint import GenerateEndpoint
from services.gateway.llm import LLM
from services.gateway.metrics import CONTENT_TYPE


def build_app(llm: LLM, wall: Callable[[], float]) -> FastAPI:
    """
    Args:
        wall: Unix seconds.
    """
    # A request's span is ours: FastAPI's own would stand beside it, a second root of the same trace.
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, telemetry={"tracing": False, "metrics": False})
    for path, read in (("/v1/chat/completions", read_chat), ("/v1/completions", read_completion)):
        app.router.routes.append(Route(path, GenerateEndpoint(llm, read, wall), methods=["POST"]))
    app.add_exception_handler(GatewayError, _refuse)
    app.add_exception_handler(HTTPException, _explain)
    _add_models(app, llm)
    _add_health(app, llm)
    return app


def _add_models(app: FastAPI, llm: LLM) -> None:
    def card() -> dict[str, Any]:
        model = llm.model
        return {
            "id": model.name, "object": "model", "created": model.created, "owned_by": "tandem", "root": model.name,
            "max_model_len": llm.max_model_len,
        }  # fmt: skip

    def authenticated(request: Request) -> None:
        llm.access.authenticate(request.headers)

    @app.get("/v1/models", dependencies=[Depends(authenticated)])
    async def models() -> dict[str, Any]:
        """The models served here."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(authenticated)])
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        llm.served(name)
        return card()


def _add_health(app: FastAPI, llm: LLM) -> None:
    @app.get("/health")
    async def health() -> dict[str, bool]:
        """The process is alive."""
        return {"alive": True}

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 where a request would be served; otherwise 503 and what is missing."""
        is_ready, found = llm.readiness()
        return JSONResponse(found, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(llm.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _explain(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, error.status_code, headers=error.headers)
