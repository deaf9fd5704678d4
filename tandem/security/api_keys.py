"""API keys and their rights: one JSON file, which the gateway follows and `tandem keys` writes.

    {"tiers": {"default": {"requests_per_minute": 60, "tokens_per_minute": 100000, "concurrent_requests": 8}},
     "keys":  [{"id": "3f9c01a2", "sha256": "…", "tenant": "acme", "tier": "default", "created": "2026-01-31"}]}

A key is `tk-<id>-<secret>`. The secret has 256 random bits, so its SHA-256, which is all that the file has, reveals
nothing, and no slow hash is needed. A tier has only the limits that it names.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandem.hosts import is_loopback

PREFIX = "tk"
DEFAULT_TIER = "default"


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tier(Part):
    """The limits of each tenant of a tier. Prices are per million tokens, in the budget's unit."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrent_requests: int | None = Field(default=None, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    daily_budget: float | None = Field(default=None, gt=0)
    prompt_price: float = Field(default=0.0, ge=0)
    cached_prompt_price: float | None = Field(default=None, ge=0)  # None: prompt_price
    completion_price: float = Field(default=0.0, ge=0)

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """Returns the cost of a request. `cached_tokens`: the prompt tokens that were cached."""
        cached_price = self.prompt_price if self.cached_prompt_price is None else self.cached_prompt_price
        cached = min(cached_tokens, prompt_tokens)
        prompt = (prompt_tokens - cached) * self.prompt_price + cached * cached_price
        return (prompt + completion_tokens * self.completion_price) / 1e6


class ApiKey(Part):
    id: str = Field(pattern="^[0-9a-f]{8}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tenant: str = Field(min_length=1, max_length=256)
    tier: str = DEFAULT_TIER
    created: str = ""
    # The key's requests may name other tenants: for a proxy that has authenticated its clients itself.
    names_tenants: bool = False
    # Models and adapters that the key's requests may name; None: all.
    models: frozenset[str] | None = None
    # The key may load and unload adapters.
    manages_models: bool = False


class Keys(Part):
    tiers: dict[str, Tier] = {DEFAULT_TIER: Tier()}
    keys: tuple[ApiKey, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Keys:
        for key in self.keys:
            if key.tier not in self.tiers:
                raise ValueError(f"key {key.id} is of tier {key.tier!r}, which tiers does not name")
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same id")
        return self

    def find(self, text: str) -> ApiKey | None:
        """Returns the key of this text; None if unknown. Takes the same time whatever part of the secret is wrong."""
        prefix, _, rest = text.partition("-")
        name, _, secret = rest.partition("-")
        said = digest(secret)
        for key in self.keys:
            if key.id == name:
                return key if prefix == PREFIX and hmac.compare_digest(key.sha256, said) else None
        return None

    def add(self, key: ApiKey) -> Keys:
        """Returns these keys and one more.

        Raises:
            ValueError: the key's tier is unknown.
        """
        return Keys(tiers=self.tiers, keys=(*self.keys, key))

    def without(self, id: str) -> Keys:
        return Keys(tiers=self.tiers, keys=tuple(key for key in self.keys if key.id != id))


def digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def read_keys(path: Path) -> Keys:
    """Reads a keys file.

    Raises:
        OSError: the file cannot be read.
        ValueError: what is wrong in the file, in one line.
    """
    return parse_keys(path.read_bytes(), path)


def parse_keys(content: bytes, path: Path) -> Keys:
    """Parses the content of a keys file.

    Raises:
        ValueError: what is wrong in the file, in one line.
    """
    try:
        return Keys.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(_problems(error))}") from None


def write_keys(path: Path, keys: Keys) -> None:
    """Writes a keys file atomically, readable only by its owner. Raises OSError."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(keys.model_dump_json(indent=2, exclude_defaults=True).encode() + b"\n")
    os.replace(file.name, path)


def check_exposed(host: str, keys: Path | None, insecure: bool) -> None:
    """Checks that a gateway which other machines can reach requires keys, unless `insecure`.

    Raises:
        ValueError: the gateway would serve any client.
    """
    if not (keys or insecure or is_loopback(host)):
        raise ValueError(
            f"host {host or 'any'} can be reached by others: give --api-keys, or --insecure to serve anyone"
        )


def text_of(id: str, secret: str) -> str:
    """Returns a key's text, which its client sends."""
    return f"{PREFIX}-{id}-{secret}"


def _problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_input=False):
        yield ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))
