"""The tenant and the urgency of a request, mapped from the fields of HTTP and gRPC alike.

    class           gRPC Priority    OpenAI service_tier    vLLM priority
    realtime        REALTIME         priority, scale        below 0
    interactive     unspecified too  auto, default          0
    batch           BATCH            flex                   above 0

    Unknown tiers count as none; the answer names the tier that the request got.

    tenant          that of the API key (access/); where none is asked for, the header x-llm-d-inference-fairness-id,
                    else OpenAI's `user`, gRPC's `tenant`, else the key that was sent, else ""

Inside the gateway a priority is vLLM's number, lower first. Its sign is the class; workers order by the number itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from hashlib import sha256

from services.gateway.errors import InvalidRequest
from services.gateway.settings import ClassName

FAIRNESS_ID = "x-llm-d-inference-fairness-id"
MAX_TENANT_LENGTH = 256


LABELS: tuple[ClassName, ...] = ("realtime", "interactive", "batch")


class PriorityClass(IntEnum):
    """The classes of urgency. The lower one wins ties."""

    REALTIME = 0
    INTERACTIVE = 1
    BATCH = 2

    @classmethod
    def of(cls, priority: int) -> PriorityClass:
        return cls.REALTIME if priority < 0 else cls.BATCH if priority else cls.INTERACTIVE

    @property
    def label(self) -> ClassName:
        return LABELS[self]

    @property
    def priority(self) -> int:
        """The priority number of requests that name only their class."""
        return 100 * (self - PriorityClass.INTERACTIVE)


TIERS = {
    "auto": PriorityClass.INTERACTIVE,
    "default": PriorityClass.INTERACTIVE,
    "priority": PriorityClass.REALTIME,
    "scale": PriorityClass.REALTIME,
    "flex": PriorityClass.BATCH,
}


def priority_of(service_tier: str | None, priority: int | None) -> int:
    """Raises InvalidRequest: a priority that is no 32-bit integer, or one beside a tier."""
    tier = service_tier if service_tier in TIERS else "auto"
    if priority is None:
        return TIERS[tier].priority
    if tier != "auto":
        raise InvalidRequest("service_tier and priority say the same thing: give only one of them", "service_tier")
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {priority}", "priority")
    return priority


def tier_served(service_tier: str | None) -> str:
    """Returns the tier to name in the answer."""
    return service_tier if service_tier in TIERS and service_tier != "auto" else "default"


def tenant_of(headers: Mapping[str, str], said: str, param: str) -> str:
    """
    Args:
        headers: of HTTP, or gRPC metadata.
        said: the tenant that the request's field `param` names.

    Raises:
        InvalidRequest: the name is too long, or not printable.
    """
    name = headers.get(FAIRNESS_ID, "")
    if name:
        param = FAIRNESS_ID
    name = name or said
    if len(name) > MAX_TENANT_LENGTH or not name.isprintable():
        raise InvalidRequest(f"{param} must be at most {MAX_TENANT_LENGTH} printable characters", param)
    return name or _tenant_of_key(headers.get("authorization", ""))


def _tenant_of_key(key: str) -> str:
    """Returns a name for a tenant by its key, from which the key cannot be found."""
    return f"key-{sha256(key.encode()).hexdigest()[:12]}" if key else ""
