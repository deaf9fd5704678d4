"""/openapi.json and /docs of routes that FastAPI does not know: their bodies, from the schemas that read
them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.apis.messages import CountTokensBody, MessagesBody
from services.gateway.apis.openai import schema
from services.gateway.apis.responses import KEPT, KEPT_BODIES, KEPT_QUERIES, Respond, ResponseBody
from services.gateway.door import paths

REF = "#/components/schemas/{model}"
JSON, EVENTS = "application/json", "text/event-stream"
STREAMED = {"description": "where `stream` is true"}
BODIES: Mapping[str, tuple[type[schema.Body], str]] = {
    "/v1/chat/completions": (schema.with_sampling(schema.ChatBody), "Answer messages, as OpenAI does"),
    "/v1/completions": (schema.with_sampling(schema.CompletionBody), "Continue text or token ids, as OpenAI does"),
    "/v1/embeddings": (schema.EmbeddingBody, "A vector of each text, as OpenAI does"),
    "/v1/score": (schema.ScoreBody, "How alike texts are, as vLLM does"),
    "/v1/rerank": (schema.RerankBody, "The documents most like a query, as Jina and vLLM do"),
    "/v1/responses": (ResponseBody, "Answer items with items, as OpenAI's Responses do"),
    "/v1/responses/input_tokens": (ResponseBody, "Count tokens of items, as OpenAI does"),
    "/v1/messages": (MessagesBody, "Answer messages, as Anthropic does"),
    "/v1/messages/count_tokens": (CountTokensBody, "Count tokens of messages, as Anthropic does"),
    "/tokenize": (schema.TokenizeBody, "Text or messages as token ids"),
    "/detokenize": (schema.DetokenizeBody, "Token ids as text"),
    "/v1/load_lora_adapter": (schema.LoadAdapterBody, "Serve a LoRA adapter beside the model"),
    "/v1/unload_lora_adapter": (schema.UnloadAdapterBody, "Serve a LoRA adapter no longer"),
}
TEXT = {"type": "string"}
# The common part of both protocols' errors: OpenAI's adds `param` and `code`, Anthropic's `type` and `request_id`.
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}}
    },
}
ERRORS: Mapping[str, Any] = {
    status: {"description": said, "content": {JSON: {"schema": {"$ref": REF.format(model="Error")}}}}
    for status, said in (
        ("4XX", "the request's fault, named in error.param"), ("5XX", "not the request's fault")
    )
}  # fmt: skip


class DescribedApp(FastAPI):
    """The app with its description.

    `direct`: apps that get the POSTs to their paths directly, without FastAPI's layers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if paths.has_more_slashes(scope["path"]):
            asked, scope = scope["path"], paths.without_more_slashes(scope)
            if asked.endswith("/") and scope["path"] in paths.PAGES:
                await paths.show_page(scope["path"], scope, receive, send)
                return
        if scope["method"] == "HEAD":
            await paths.answer_head(super().__call__, self.routes, scope, receive, send)
            return
        app = self.direct.get(scope["path"]) if scope["method"] == "POST" else None
        await (super().__call__ if app is None else app)(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Returns FastAPI's description together with that of routes that FastAPI does not know."""
        if self.openapi_schema is None:
            found = super().openapi()
            bodies = [(body, "validation") for body in (*(body for body, _ in BODIES.values()), *KEPT_BODIES.values())]
            _, definitions = models_json_schema(bodies, ref_template=REF)  # type: ignore[arg-type]
            found["components"] = {"schemas": {**definitions["$defs"], "Error": ERROR}}
            for operations in found["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's own error, which is never returned
                    operation["responses"] |= ERRORS
            found["paths"]["/ping"] = {method: _ping(method) for method in ("get", "post")}
            for path, (body, summary) in BODIES.items():
                found["paths"][path] = {"post": _generating(body, summary)}
            for path, methods in KEPT.items():
                found["paths"][path] = {method.lower(): _kept(path, respond) for method, respond in methods.items()}
        assert self.openapi_schema is not None
        return self.openapi_schema


def _generating(body: type[schema.Body], summary: str) -> dict[str, Any]:
    name = summary.partition(",")[0].lower().replace(" ", "_")
    streams = {EVENTS: {"schema": STREAMED}} if "stream" in body.model_fields else {}
    return {"requestBody": _body(body, required=True), **_operation(name, summary, streams)}


def _kept(path: str, respond: Respond) -> dict[str, Any]:
    queries = KEPT_QUERIES.get(respond, {})
    said: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT} for name in re.findall(r"{(\w+)}", path)
    ]
    said += [{"name": name, "in": "query", "schema": query} for name, query in queries.items()]
    streams = {EVENTS: {"schema": STREAMED}} if "stream" in queries else {}
    operation = _operation(respond.__name__, (respond.__doc__ or "").rstrip("."), streams)
    if body := KEPT_BODIES.get(respond):
        operation["requestBody"] = _body(body, required=any(f.is_required() for f in body.model_fields.values()))
    return {"parameters": said, **operation}


def _ping(method: str) -> dict[str, Any]:
    said = {"summary": "The process is alive, as SageMaker and vLLM ask for it", "operationId": f"{method}_ping"}
    return {**said, "responses": {"200": {"description": "an empty body"}, **ERRORS}}


def _body(body: type[schema.Body], required: bool) -> dict[str, Any]:
    return {"required": required, "content": {JSON: {"schema": {"$ref": REF.format(model=body.__name__)}}}}


def _operation(name: str, summary: str, others: Mapping[str, Any]) -> dict[str, Any]:
    answer = {"description": "the answer", "content": {JSON: {"schema": {"type": "object"}}, **others}}
    return {"summary": summary, "operationId": name, "responses": {"200": answer, **ERRORS}}
