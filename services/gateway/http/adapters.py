"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from typing import Any

from services.gateway.http import schema
from services.gateway.llm import LLM


async def load_adapter(llm: LLM, body: bytes) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = schema.validated(schema.LoadAdapterBody, body)
    await llm.adapters.load(found.lora_name, found.lora_path)
    return {"loaded": found.lora_name}


async def unload_adapter(llm: LLM, body: bytes) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = schema.validated(schema.UnloadAdapterBody, body)
    await llm.adapters.unload(found.lora_name)
    return {"unloaded": found.lora_name}
