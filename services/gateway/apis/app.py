"""The FastAPI app. Generating routes bypass it (`DescribedApp.direct`); all others are ordinary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from services.gateway.apis.admin.adapters import load_adapter, unload_adapter
from services.gateway.apis.admin.models import add_models
from services.gateway.apis.admin.pages import add_pages
from services.gateway.apis.admin.running_settings import SettingsEndpoint
from services.gateway.apis.admin.targets import scrape_targets
from services.gateway.apis.chat import CHAT, read_chat
from services.gateway.apis.completions import COMPLETION, read_completion
from services.gateway.apis.embeddings import EMBEDDING, RERANK, SCORE, read_embeddings, read_rerank, read_score
from services.gateway.apis.messages import COUNTED, MESSAGES, Anthropic, count_tokens, read_messages_body
from services.gateway.apis.openapi import DescribedApp
from services.gateway.apis.responses import RESPONSE, count_input, kept_routes, names_no_kept, read_response
from services.gateway.apis.tokenize import DETOKENIZE, TOKENIZE, detokenize, tokenize
from services.gateway.bodies import BodyReader
from services.gateway.console import Console, add_console
from services.gateway.directory import ModelDirectory, of_gateway
from services.gateway.door import (
    OPENAI,
    RESPONSES,
    AdminEndpoint,
    GenerateEndpoint,
    ReadBody,
    RespondTo,
    TextEndpoint,
    request_id_of,
)
from services.gateway.errors import GatewayError, Internal, InvalidRequest, NotUpgraded, unexpected
from services.gateway.settings import GatewaySettings
from services.gateway.shared import Shared
from services.gateway.telemetry import RecentRequests
from tandem import __version__
from tandem.process import Look, RunningSettings, lasting

log = structlog.get_logger(__name__)
MESSAGES_PATH = "/v1/messages"
GENERATING: Sequence[tuple[str, ReadBody, BodyReader[Any]]] = (
    ("/v1/chat/completions", read_chat, CHAT),
    ("/v1/completions", read_completion, COMPLETION),
    ("/v1/responses", read_response, RESPONSE),
    ("/v1/embeddings", read_embeddings, EMBEDDING),
    ("/v1/score", read_score, SCORE),
    ("/v1/rerank", read_rerank, RERANK),
)
OF_TEXT: Sequence[tuple[str, RespondTo, BodyReader[Any]]] = (
    ("/v1/responses/input_tokens", count_input, RESPONSE),
    ("/tokenize", tokenize, TOKENIZE),
    ("/detokenize", detokenize, DETOKENIZE),
)


def build_app(
    directory: ModelDirectory, wall: Callable[[], float], integrity: Look, traces: RecentRequests,
    running: RunningSettings[GatewaySettings], console: Console,
) -> FastAPI:  # fmt: skip
    """
    Args:
        wall: returns Unix seconds.
        integrity: returns what the gateway holds.
    """
    # FastAPI's own spans are off: they would be second roots of a request's trace.
    plain = {"tracing": False, "metrics": False}
    app = DescribedApp(
        title="Tandem", version=__version__, docs_url=None, redoc_url=None, telemetry=plain, redirect_slashes=False
    )  # fmt: skip
    shared = directory.shared
    cors = cors_of(shared.settings)
    for path, read, reader in GENERATING:
        dialect = RESPONSES if read is read_response else OPENAI
        endpoint = GenerateEndpoint(directory, read, reader, wall).speaking(dialect)
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
        app.direct[path] = CORSMiddleware(endpoint, **cors) if cors else endpoint
    anthropic = Anthropic(wall)
    _add_messages(app, directory, wall, cors, anthropic)
    _refuse_upgrade(app)
    for path, respond, reader in OF_TEXT:
        app.router.routes.append(Route(path, TextEndpoint(directory, respond, reader), methods=["POST"]))
    app.router.routes.extend(kept_routes(shared, wall))
    _add_admin(app, directory, running)
    _add_errors(app, shared, anthropic)
    add_models(app, directory)
    _add_health(app, directory)
    _add_metrics(app, shared)
    if cors:
        app.add_middleware(CORSMiddleware, **cors)
    _add_integrity(app, integrity)
    _add_traces(app, shared, traces)
    add_pages(app)
    add_console(app, shared.access, console)
    return app


def _add_messages(
    app: DescribedApp,
    directory: ModelDirectory,
    wall: Callable[[], float],
    cors: Mapping[str, Any],
    anthropic: Anthropic,
) -> None:
    """Add Anthropic's routes, whose errors are in its own form."""
    create = GenerateEndpoint(directory, read_messages_body, MESSAGES, wall).speaking(anthropic)
    count = TextEndpoint(directory, count_tokens, COUNTED).speaking(anthropic)
    for path, endpoint in ((MESSAGES_PATH, create), (f"{MESSAGES_PATH}/count_tokens", count)):
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
        app.direct[path] = CORSMiddleware(endpoint, **cors) if cors else endpoint


def _refuse_upgrade(app: FastAPI) -> None:
    @app.get("/v1/responses", include_in_schema=False)
    async def upgrade(request: Request) -> None:
        """Refuse a WebSocket, which some agents try before POST."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            raise NotUpgraded("there is no WebSocket here: POST /v1/responses, with stream for events")
        raise HTTPException(405, headers={"allow": "POST"})


def cors_of(settings: GatewaySettings) -> dict[str, Any]:
    """Returns the CORS rules. No cookies, as pages send their key themselves."""
    if not settings.cors_origins:
        return {}
    every = ["*"]
    return {
        "allow_origins": settings.cors_origins, "allow_methods": every, "allow_headers": every, "expose_headers": every
    }  # fmt: skip


def _add_health(app: FastAPI, directory: ModelDirectory) -> None:
    shared = directory.shared

    @app.get("/health")
    async def health() -> dict[str, bool]:
        """Returns that the process is alive."""
        return {"alive": True}

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 where a request would be served; otherwise 503 and what is missing."""
        is_ready, found = of_gateway(directory)
        return JSONResponse(found, 200 if is_ready else 503)

    async def ping(request: Request) -> Response:
        return Response()

    # One route, so that its 405 names both methods.
    app.router.routes.append(Route("/ping", ping, methods=["GET", "POST"]))

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Returns the number of requests that run or wait here."""
        return {"server_load": len(shared.state.running)}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Returns the version of Tandem."""
        return {"version": __version__}


def _add_metrics(app: FastAPI, shared: Shared) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Returns the metrics for Prometheus. Tenants' names are shown to operators only, if keys are required."""
        names_tenants = shared.access.may_name_tenants(request.headers)
        text, content_type = shared.metrics.exposition(request.headers.get("accept", ""), names_tenants)
        return Response(text, headers={"content-type": content_type})

    @app.get("/metrics/targets")
    async def targets(request: Request) -> list[dict[str, Any]]:
        """Returns the scrape targets of the cluster, for Prometheus' http_sd_configs."""
        shared.access.authenticate(request.headers)
        return await scrape_targets(shared.view)


def _add_integrity(app: FastAPI, integrity: Look) -> None:
    @app.get("/debug/integrity")
    async def look() -> dict[str, Any]:
        """Returns everything that is held, and the part that no request accounts for."""
        return (await lasting(integrity)).json()


def _add_admin(app: FastAPI, directory: ModelDirectory, running: RunningSettings[GatewaySettings]) -> None:
    for path, manage in (("/v1/load_lora_adapter", load_adapter), ("/v1/unload_lora_adapter", unload_adapter)):
        app.router.routes.append(
            Route(path, AdminEndpoint(directory.shared, partial(manage, directory)), methods=["POST"])
        )
    app.router.routes.append(
        Route("/debug/settings", SettingsEndpoint(directory.shared, running), methods=["GET", "POST"])
    )


def _add_traces(app: FastAPI, shared: Shared, traces: RecentRequests) -> None:
    @app.get("/debug/traces/{request_id:path}")
    async def trace(request_id: str, request: Request) -> JSONResponse:
        """Returns the waterfall of a recent request: one's own, or any with a key that manages models."""
        return JSONResponse(await traces.trace(request_id, shared.access.authenticate(request.headers)))


def _add_errors(app: FastAPI, shared: Shared, anthropic: Anthropic) -> None:
    def respond(request: Request, error: GatewayError, status: int, headers: Mapping[str, str]) -> JSONResponse:
        path = request.url.path
        dialect = anthropic if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else OPENAI
        request_id = request_id_of(request.headers, shared.new_id)
        named = {dialect.id_header: request_id, **dialect.headers(headers)}
        return JSONResponse(dialect.body(error, request_id, status), status, headers=named)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, GatewayError)
        return respond(request, error, error.status, error.headers)

    async def explain(request: Request, error: Exception) -> JSONResponse:
        """Returns the error of an unknown path or method in the common form."""
        assert isinstance(error, HTTPException)
        status, detail, headers = error.status_code, error.detail, error.headers or {}
        if status == HTTPStatus.METHOD_NOT_ALLOWED and names_no_kept(request.url.path):
            status, detail, headers = HTTPStatus.NOT_FOUND, HTTPStatus.NOT_FOUND.phrase, {}
        return respond(request, InvalidRequest(f"{request.method} {request.url.path}: {detail}"), status, headers)

    async def apologize(request: Request, error: Exception) -> JSONResponse:
        request_id = request_id_of(request.headers, shared.new_id)
        log.error("request failed", request_id=request_id, exc_info=error)
        return respond(request, unexpected(request_id), Internal.status, {"x-request-id": request_id})

    app.add_exception_handler(GatewayError, refuse)
    app.add_exception_handler(HTTPException, explain)
    app.add_exception_handler(Exception, apologize)
