"""The settings of a gateway. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, field_validator, model_validator

from tandem.aliases import MOST_ALIASES, Alias, Targets
from tandem.registry import Role
from tandem.security import check_exposed
from tandem.service_settings import RequestSettings

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@,]+")


class Disaggregation(StrEnum):
    """The policy by which prompts are prefilled."""

    REQUIRE = "require"  # a prefill worker, or the request fails
    PREFER = "prefer"  # a prefill worker; the decode worker if none can
    AUTO = "auto"  # whichever costs less, by the rates that the workers have measured


class ToolParser(StrEnum):
    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    DEEPSEEK = "deepseek"
    GRANITE = "granite"
    PHI4_MINI = "phi4_mini"
    GLM4 = "glm4"
    HARMONY = "harmony"


class ReasoningParser(StrEnum):
    AUTO = "auto"
    NONE = "none"
    THINK = "think"  # <think>...</think>
    MISTRAL = "mistral"  # [THINK]...[/THINK]
    HARMONY = "harmony"  # gpt-oss' channel for thoughts
    GRANITE = "granite"  # <think>...</think><response>...</response>
    GRANITE_3_2 = "granite_3_2"  # two sentences


# Settings that may change at run time.
FOLLOWED = frozenset(
    {
        "classes", "tenant_weights", "max_queued", "max_admitted_tokens", "timeout_s", "log_level", "trace_sampling",
        "aliases",
    }
)  # fmt: skip


MAX_TIMEOUT_S = 24 * 3600.0
# Bounds of settings at run time: even a mistake leaves a cluster that serves.
Weight = Annotated[float, Field(ge=0.001, le=1000)]
MOST_TOKENS = 10**9


class ClassSettings(BaseModel):
    """A priority class. Times are in seconds; None: no target. `objective`: see docs/slo.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: Weight = 1.0
    ttft_s: float | None = Field(None, ge=0.01, le=MAX_TIMEOUT_S)
    itl_s: float | None = Field(None, ge=0.001, le=MAX_TIMEOUT_S)
    objective: float = Field(0.99, gt=0, lt=1)


ClassName = Literal["realtime", "interactive", "batch"]
CLASSES: dict[ClassName, ClassSettings] = {
    "realtime": ClassSettings(weight=8, itl_s=0.1),
    "interactive": ClassSettings(weight=4, itl_s=0.1),
    "batch": ClassSettings(weight=1),
}


class GatewaySettings(RequestSettings):
    models: tuple[str, ...] = Field((), description="names of the models to serve; if not set, all that have workers")
    aliases: dict[str, Targets] = Field(
        {}, description="more names of a model, or of several: of each its models or adapters, with a weight or "
        '"fallback"; what `tandem models alias` says goes before',
    )  # fmt: skip
    tool_parser: ToolParser = Field(
        ToolParser.AUTO, description="how the model writes calls of tools; auto: as its chat template shows"
    )
    reasoning_parser: ReasoningParser = Field(
        ReasoningParser.AUTO, description="what the model writes around its thoughts; auto: as its chat template shows"
    )
    store_url: str = Field(
        "",
        description="another Redis, which may evict, for responses that clients ask to be kept; none: nothing is",
    )
    api_keys: Path | None = Field(
        None, description="file of API keys, as `tandem keys` writes it; none: anyone may ask"
    )
    insecure: bool = Field(False, description="serve anyone who reaches the gateway, without API keys")
    share_prefixes: bool = Field(False, description="with API keys: let tenants find each other's prefixes cached")
    cors_origins: tuple[str, ...] = Field(
        (), description="web pages that may ask from a browser: https://host[:port], or * for any; none: no page"
    )
    http_port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    grpc_port: int = Field(50051, ge=0, le=65535, description="0 takes a free one")
    own_http_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="HTTP port of this process alone; others may share http-port and grpc-port",
    )
    disaggregation: Disaggregation = Field(
        Disaggregation.AUTO,
        description="remote prefill always (require), where workers are linked (prefer), or where quicker (auto)",
    )
    timeout_s: float = Field(600, ge=1, le=MAX_TIMEOUT_S, description="deadline of a request that brings none")
    max_body_bytes: int = Field(16 * 2**20, gt=0, description="of a request, on HTTP and on gRPC")
    classes: dict[ClassName, ClassSettings] = Field(
        CLASSES,
        description="of each class: its share of tokens when all have requests waiting (weight), the time to a first "
        "token beyond which a request is refused (ttft_s), the time between tokens that prompts beside its answers "
        "leave (itl_s), null: no target; and the share of its requests that should meet both (objective). What a map "
        "leaves out stays as it is",
    )
    tenant_weights: dict[str, Weight] = Field({}, description="share of tokens within a class; 1 if not named")
    worker_hour_prices: dict[Role, PositiveFloat] = Field(
        {}, description="price of an hour of one worker, by role (prefill, decode), for metrics of what tokens cost"
    )
    max_queued: int = Field(
        1024,
        ge=1,
        le=100_000,
        description="most choices waiting for their turn, at all gateways of the model; beyond it, 429",
    )
    max_admitted_tokens: int | None = Field(
        None,
        ge=32,
        le=MOST_TOKENS,
        description="prompts and answers in the cluster at once; if not set, what it finds room for",
    )
    trace_sampling: float = Field(1.0, ge=0, le=1, description="share of requests that are traced")

    @field_validator("classes", mode="before")
    @classmethod
    def _beside_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = {name: default.model_dump() for name, default in CLASSES.items()}
        changed = {name: defaults.get(name, {}) | said for name, said in given.items() if isinstance(said, dict)}
        return defaults | given | changed

    @field_validator("aliases")
    @classmethod
    def _are_aliases(cls, aliases: dict[str, Targets]) -> dict[str, Targets]:
        if len(aliases) > MOST_ALIASES:
            raise ValueError(f"at most {MOST_ALIASES} aliases, got {len(aliases)}")
        for name, targets in aliases.items():
            Alias(name, targets)
        return aliases

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin: scheme://host or scheme://host:port, or *")
        return origins

    @property
    def shares_ports(self) -> bool:
        return self.own_http_port is not None

    @model_validator(mode="after")
    def _shareable(self) -> GatewaySettings:
        for name, port in (("http-port", self.http_port), ("grpc-port", self.grpc_port)):
            if self.shares_ports and not port:
                raise ValueError(f"{name}: 0 chooses a free one, and with own-http-port others have to know it")
        if self.own_http_port == self.http_port:
            raise ValueError(f"own-http-port: {self.own_http_port} is http-port, which others may share")
        return self

    @model_validator(mode="after")
    def _closed(self) -> GatewaySettings:
        check_exposed(self.host, self.api_keys, self.insecure)
        return self
