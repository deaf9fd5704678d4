"""Browsers: pages of the origins that settings name may ask, and read answers, errors and streams; no others."""

from __future__ import annotations

import httpx
import pytest

from services.gateway import GatewaySettings
from tests.gateway.peers import MODEL

PAGE, OTHER = "https://chat.example:8443", "https://elsewhere.example"
BODY = {"model": MODEL, "prompt": "once upon", "seed": 0}


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"cors_origins": (PAGE,)})


async def test_pages_of_a_named_origin_may_ask(http: httpx.AsyncClient) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = await http.options("/v1/chat/completions", headers={"origin": PAGE, **asks})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    refused = await http.options("/v1/chat/completions", headers={"origin": OTHER, **asks})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


async def test_they_read_answers_errors_and_streams(http: httpx.AsyncClient) -> None:
    for body, status in ((BODY, 200), ({**BODY, "stream": True}, 200), ({**BODY, "n": 0}, 400)):
        for origin, readable in ((PAGE, True), (OTHER, False)):
            answer = await http.post("/v1/completions", json=body, headers={"origin": origin})
            assert answer.status_code == status
            assert ("access-control-allow-origin" in answer.headers) == readable


def test_what_is_no_origin_is_named(settings: GatewaySettings) -> None:
    for wrong in ("chat.example", "https://chat.example/page", "https://"):
        with pytest.raises(ValueError, match="is no origin"):
            GatewaySettings(cors_origins=(wrong,))
