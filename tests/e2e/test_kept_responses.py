"""Responses that `tandem up` keeps: any gateway tells of them, also of those whose gateway was killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import eventually
from tests.e2e.test_anthropic_agent import BOUND_S, AgentFleet, fleet, model

__all__ = ["fleet", "model"]  # fixtures
pytestmark = pytest.mark.long
ASKED: dict[str, Any] = {"model": "tiny", "input": "tell me", "max_output_tokens": 8}


def post(fleet: AgentFleet, number: int, **said: Any) -> Any:
    answer = httpx.post(f"http://127.0.0.1:{fleet.own[number]}/v1/responses", json=ASKED | said, timeout=BOUND_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(fleet: AgentFleet, number: int, name: str) -> Any:
    return httpx.get(f"http://127.0.0.1:{fleet.own[number]}/v1/responses/{name}", timeout=BOUND_S).json()


def test_any_gateway_goes_on(fleet: AgentFleet) -> None:
    first = post(fleet, 0)
    assert first["store"] is True
    assert get(fleet, 1, first["id"]) == first
    second = post(fleet, 1, previous_response_id=first["id"])
    assert len(get(fleet, 0, f"{second['id']}/input_items")["data"]) == 3


def test_a_gateway_that_is_killed_has_failed_what_it_made(fleet: AgentFleet) -> None:
    queued = post(fleet, 0, background=True, max_output_tokens=100_000, ignore_eos=True)
    eventually(lambda: fleet.busy() is not None, BOUND_S, "a gateway with a request")
    pid = fleet.busy()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: get(fleet, 1, queued["id"])["status"] == "failed", BOUND_S, "a failed response")
    eventually(lambda: len(fleet.cluster.pids("gateway")) == 2, BOUND_S, "two gateways")
