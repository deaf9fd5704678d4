"""Pages that are open where keys are asked for: they name no tenant."""

from __future__ import annotations

import httpx

from services.gateway import Gateway
from tests.gateway.conftest import eventually
from tests.gateway.test_access import KeyRing, complete, guarded, ring

__all__ = ["guarded", "ring"]  # fixtures
OPEN = ("/metrics", "/debug/integrity", "/health/ready", "/health", "/load", "/version", "/openapi.json", "/console")


async def test_only_operators_read_tenants_names(guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing) -> None:
    """A scraper without a key reads sums over tenants: alerts need no names."""
    _, http = guarded
    keys, operator = [ring.add(tenant) for tenant in ("acme", "globex")], ring.add("us", "--manages-models")

    async def known() -> bool:
        return (await http.get("/v1/models", headers=operator)).status_code == 200

    await eventually(known)
    for key in keys:
        assert (await complete(http, key, max_tokens=3)).status_code == 200
    for page in OPEN:
        for headers in ({}, keys[0]):
            text = (await http.get(page, headers=headers)).raise_for_status().text
            assert "acme" not in text, page
            assert "globex" not in text, page
    text = (await http.get("/metrics")).text
    sums = {line.rpartition("{")[0]: line.rpartition(" ")[2] for line in text.splitlines() if 'tenant=""' in line}
    assert sums["tandem_slo_requests_total"] == sums["tandem_tenant_ttft_seconds_count"] == "2.0"
    assert sums["tandem_tenant_tokens_total"] == "6.0"  # of the kind that comes last, those generated
    text = (await http.get("/metrics", headers=operator)).text
    assert text.count('tenant="acme"') == text.count('tenant="globex"') > 0
    for page, headers in (("/metrics", {"authorization": "Bearer tk-no-key"}), ("/console/feed", {}),
                          ("/debug/traces/x", {}), ("/metrics/targets", {}), ("/debug/settings", {})):  # fmt: skip
        assert (await http.get(page, headers=headers)).status_code == 401, page


async def test_without_keys_everyone_reads_them(http: httpx.AsyncClient) -> None:
    assert (await complete(http, {"x-llm-d-inference-fairness-id": "acme"}, max_tokens=3)).status_code == 200
    assert 'tenant="acme"' in (await http.get("/metrics")).text
