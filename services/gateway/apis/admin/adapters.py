"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from typing import Any

from services.gateway.apis.openai import schema
from services.gateway.directory import ModelDirectory


async def load_adapter(directory: ModelDirectory, body: bytes) -> dict[str, Any]:
    """Raises GatewayError."""
    found = schema.validated(schema.LoadAdapterBody, body)
    await directory.load_adapter(found.lora_name, found.lora_path, found.base_model_name)
    return {"loaded": found.lora_name}


async def unload_adapter(directory: ModelDirectory, body: bytes) -> dict[str, Any]:
    """Raises GatewayError."""
    found = schema.validated(schema.UnloadAdapterBody, body)
    await directory.unload_adapter(found.lora_name)
    return {"unloaded": found.lora_name}
