"""GET and POST /debug/settings: the settings that may change at run time, for keys that manage models."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.door import ADMIN_BYTES, Endpoint, Exchange
from services.gateway.errors import InvalidRequest
from services.gateway.settings import GatewaySettings
from services.gateway.shared import Shared
from tandem.process import RunningSettings


class SettingsEndpoint(Endpoint):
    def __init__(self, shared: Shared, running: RunningSettings[GatewaySettings]) -> None:
        super().__init__(shared)
        self._running = running

    async def _serve(self, exchange: Exchange) -> None:
        client = self._shared.access.authenticate(exchange.headers)
        client.check_manages()
        if exchange.scope["method"] == "POST":
            body = await exchange.body(ADMIN_BYTES, self._shared.deadlines)
            host = (exchange.scope.get("client") or ("",))[0]
            by = f"key {client.key_id} of {client.tenant}" if client.key_id else "anyone"
            self._set(body, f"{by}, from {host}")
        await exchange.json(200, self._running.report(), {})

    def _set(self, body: bytes, by: str) -> None:
        """Raises InvalidRequest."""
        try:
            said: Any = json.loads(body)
            if not isinstance(said, dict) or said.keys() != {"settings", "ttl_s"}:
                raise ValueError('the body is {"settings": {…}, "ttl_s": seconds}')
            settings, ttl_s = said["settings"], said["ttl_s"]
            if not isinstance(settings, dict) or isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
                raise ValueError("settings must be an object, and ttl_s a number of seconds")
            self._running.override(settings, ttl_s, by)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(str(error), "settings") from None
