"""/openapi.json and /docs of routes that FastAPI does not know: their bodies, from the schemas that read
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http import schema
from services.gateway.http.messages import CountTokensBody, MessagesBody
from services.gateway.http.responses import ResponseBody

REF = "#/components/schemas/{model}"
JSON, EVENTS = "application/json", "text/event-stream"
BODIES: Mapping[str, tuple[type[schema.Body], str]] = {
    "/v1/chat/completions": (schema.with_sampling(schema.ChatBody), "Answer messages, as OpenAI does"),
    "/v1/completions": (schema.with_sampling(schema.CompletionBody), "Continue text or token ids, as OpenAI does"),
    "/v1/responses": (ResponseBody, "Answer items with items, as OpenAI's Responses do"),
    "/v1/messages": (MessagesBody, "Answer messages, as Anthropic does"),
    "/v1/messages/count_tokens": (CountTokensBody, "Count tokens of messages, as Anthropic does"),
    "/tokenize": (schema.TokenizeBody, "Text or messages as token ids"),
    "/detokenize": (schema.DetokenizeBody, "Token ids as text"),
    "/v1/load_lora_adapter": (schema.LoadAdapterBody, "Serve a LoRA adapter beside the model"),
    "/v1/unload_lora_adapter": (schema.UnloadAdapterBody, "Serve a LoRA adapter no longer"),
}


class DescribedApp(FastAPI):
    """`direct`: apps that get the POSTs to their path as they come, past all that FastAPI wraps around a route."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (super().__call__ if app is None else app)(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """FastAPI's own description, and that of `BODIES`."""
        if self.openapi_schema is None:
            found = super().openapi()
            bodies = [(body, "validation") for body, _ in BODIES.values()]
            _, definitions = models_json_schema(bodies, ref_template=REF)  # type: ignore[arg-type]
            found.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            for path, (body, summary) in BODIES.items():
                found["paths"][path] = {"post": _operation(body, summary)}
        assert self.openapi_schema is not None
        return self.openapi_schema


def _operation(body: type[schema.Body], summary: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "the answer", "content": {JSON: {"schema": {"type": "object"}}}}
    if "stream" in body.model_fields:
        answer["content"][EVENTS] = {"schema": {"type": "string", "description": "where `stream` is true"}}
    errors = {"4XX": "the request's fault, named in error.param", "5XX": "not the request's fault"}
    return {
        "summary": summary,
        "operationId": summary.partition(",")[0].lower().replace(" ", "_"),
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": {"$ref": REF.format(model=body.__name__)}}},
        },
        "responses": {"200": answer, **{status: {"description": said} for status, said in errors.items()}},
    }
