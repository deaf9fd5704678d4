"""GET /v1/models: the models served here, for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from services.gateway.directory import Listed, ModelDirectory, mixed, shares
from tandem.registry import ModelStatus


def add_models(app: FastAPI, directory: ModelDirectory) -> None:
    def cards(request: Request) -> list[dict[str, Any]]:
        client = directory.shared.access.authenticate(request.headers)
        return [_card(one, directory) for one in directory.models(client)] + [
            _card_asleep(one) for one in directory.asleep(client)
        ]

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Lists the models served here, LoRA adapters included."""
        found = cards(request)
        return {
            "object": "list", "data": found, "has_more": False,
            "first_id": found[0]["id"] if found else None, "last_id": found[-1]["id"] if found else None,
        }  # fmt: skip

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Describes one model."""
        for card in cards(request):
            if card["id"] == name:
                return card
        raise directory.unknown(name, directory.shared.access.authenticate(request.headers))


def _card(listed: Listed, directory: ModelDirectory) -> dict[str, Any]:
    model, llm = listed.model, listed.llm
    of = directory.versions(llm.key.name)
    warned = {"warning": why} if (why := mixed(of)) else {}
    behind = {"weights": listed.alias.shares, "fallbacks": listed.alias.fallbacks} if listed.alias else {}
    return {
        **_named(model.name, model.created), "root": model.adapter.path if model.adapter else llm.key.name,
        "parent": model.parent or None, "max_model_len": listed.max_model_len,
        "state": "ready" if listed.ready else "not ready", "fingerprint": llm.key.fingerprint,
        "fingerprints": shares(of), "max_input_tokens": listed.max_model_len, **behind,
        **warned,
    }  # fmt: skip


def _card_asleep(status: ModelStatus) -> dict[str, Any]:
    """Returns the description of a sleeping model, of which less is known."""
    starts = {"state": status.state, "starts_in_s": status.left_s, "reason": status.reason or None}
    return {**_named(status.name, 0), "root": status.name, "parent": None, **starts}


def _named(name: str, created: int) -> dict[str, Any]:
    """Returns a model's name and date in the fields of OpenAI and of Anthropic."""
    at = datetime.fromtimestamp(created, UTC).isoformat()
    return {
        "id": name, "object": "model", "created": created, "owned_by": "tandem", "type": "model", "display_name": name,
        "created_at": at, "lifecycle": "active",
    }  # fmt: skip
