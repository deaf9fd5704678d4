"""API keys: the client that a request's key stands for, and what it may do.

    no key file     anyone may ask; the tenant is the one that the request names
    a key file      `Authorization: Bearer tk-…` on every request, HTTP or gRPC; the tenant is the key's, whatever the
                    request says, unless the key may name others; prefix caches are apart for each tenant

The file is followed: a key added or revoked counts within FOLLOW_S. It is read each time, for a file's stamp does not
tell of every change. A file that turns bad changes nothing, loudly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.gateway.admission import FAIRNESS_ID, tenant_of
from services.gateway.errors import Forbidden, Unauthorized
from tandem.process import WorkThreads
from tandem.security import Keys, Tier, parse_keys

log = structlog.get_logger(__name__)
FOLLOW_S = 0.5
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that a key stands for."""

    tenant: str
    tier: Tier
    names_tenants: bool
    models: frozenset[str] | None = None  # that the client may use; None: all
    manages_models: bool = True
    key_id: str = ""  # the key's public part

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_manages(self) -> None:
        """Raises Forbidden."""
        if not self.manages_models:
            raise Forbidden("this API key may not manage this: its `manages_models` is not set")


ANYONE = Caller("", Tier(), names_tenants=True)


class Access:
    """The keys of a file, which `run` follows."""

    def __init__(self, path: Path | None, share_prefixes: bool) -> None:
        """Raises OSError, ValueError: the file is missing or malformed."""
        self._path = path
        self._share_prefixes = share_prefixes
        self._content = path.read_bytes() if path else b""
        self._keys = parse_keys(self._content, path) if path else Keys()
        self._problem = ""
        self._thread = WorkThreads("api-keys", 1)

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """
        Args:
            headers: of HTTP, or gRPC metadata.

        Raises:
            Unauthorized
        """
        if self._path is None:
            return ANYONE
        said = _said_key(headers)
        if not said:
            raise Unauthorized("an API key is required, as `Authorization: Bearer tk-…`", code="missing_api_key")
        key = self._keys.find(said[len(SCHEME) :].strip()) if said[: len(SCHEME)].lower() == SCHEME else None
        if key is None:
            raise Unauthorized("the API key is not valid", code="invalid_api_key")
        return Caller(
            key.tenant, self._keys.tiers[key.tier], key.names_tenants, key.models,
            manages_models=key.manages_models, key_id=key.id,
        )  # fmt: skip

    def may_name_tenants(self, headers: Mapping[str, str]) -> bool:
        """True if the client may see other tenants' names: an operator's key, or no keys are required.

        Raises:
            Unauthorized: the key is not valid.
        """
        if self._path is None or not _said_key(headers):
            return self._path is None
        return self.authenticate(headers).manages_models

    def tenant(self, client: Caller, headers: Mapping[str, str], said: str, param: str) -> str:
        """Returns the tenant of a request whose field `param` names `said`.

        Raises:
            InvalidRequest: the name is malformed.
        """
        if client is ANYONE:
            return tenant_of(headers, said, param)
        named = tenant_of(headers, "", param) if client.names_tenants and FAIRNESS_ID in headers else ""
        return named or client.tenant

    def cache_salt(self, tenant: str, said: str) -> str:
        """Returns the salt of a prompt's block hashes: two tenants share no block, even of equal prompts."""
        return said if self._path is None or self._share_prefixes else f"{tenant}\0{said}"

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            if self._path:
                await self._follow(self._path)

    async def _follow(self, path: Path) -> None:
        try:
            content = await self._thread.run(path.read_bytes)
            if content != self._content:
                self._keys, self._content = parse_keys(content, path), content
                log.info("API keys read", path=str(path), keys=len(self._keys.keys))
            self._problem = ""
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("API keys cannot be read: those known before stay valid", error=self._problem)


def _said_key(headers: Mapping[str, str]) -> str:
    """Returns the value of the header that carries a key, OpenAI's or Anthropic's, as OpenAI's; "" without one."""
    key = headers.get("x-api-key", "")
    return headers.get("authorization", "") or (f"Bearer {key}" if key else "")
