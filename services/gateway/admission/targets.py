"""A request's latency targets: its own headers, HTTP or gRPC metadata, else its class's settings.

x-llm-d-slo-ttft-ms    to the first token: routing weighs who would be late; what would get it later is refused at once
x-llm-d-slo-tpot-ms    between tokens: no step beside its own prefills more of others' prompts than keeps this

A deadline named by the request is one, too. Without any, nothing is refused as late, and routing aims at what
readers of the class expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from services.gateway.admission.priority import PriorityClass
from services.gateway.errors import InvalidRequest
from services.gateway.settings import GatewaySettings

TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
MAX_MS = 24 * 3600 * 1000
AIM_S = {PriorityClass.REALTIME: 1.0, PriorityClass.INTERACTIVE: 5.0}


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets in seconds; None: none. `end_by`: the request's own deadline, on the event loop's clock."""

    ttft_s: float | None = None
    itl_s: float | None = None
    end_by: float = inf
    aim_s: float | None = None  # TTFT that routing aims at


NO_TARGETS = Targets()


def targets_of(headers: Mapping[str, str], priority: int, settings: GatewaySettings, end_by: float = inf) -> Targets:
    """Raises InvalidRequest: a header is no number of milliseconds."""
    kind = PriorityClass.of(priority)
    own = settings.classes[kind.label]
    ttft_s, itl_s = _seconds(headers, TTFT), _seconds(headers, TPOT)
    ttft_s = own.ttft_s if ttft_s is None else ttft_s
    itl_s = own.itl_s if itl_s is None else itl_s
    return Targets(ttft_s, itl_s, end_by, AIM_S.get(kind) if ttft_s is None else ttft_s)


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    said = headers.get(name)
    if said is None:
        return None
    try:
        milliseconds = float(said)
    except ValueError:
        milliseconds = 0.0
    if not 1 <= milliseconds <= MAX_MS:
        raise InvalidRequest(f"{name} must be milliseconds, a number from 1 to {MAX_MS}, got {said!r}", name)
    return milliseconds / 1000
