"""A renewed certificate counts at the gateway without a restart, also towards a worker that it was connected to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway import GatewaySettings
from services.gateway.__main__ import make_gateway
from tandem.registry import Registry
from tandem.security import TLS, Security
from tests.authority import Authority
from tests.gateway.conftest import eventually
from tests.gateway.peers import Peers, peers_on


def put(new: TLS, files: TLS) -> None:
    for name in ("certificate", "key", "ca"):
        getattr(files, name).write_bytes(getattr(new, name).read_bytes())


@pytest.fixture
def files(tmp_path: Path) -> TLS:
    return TLS.of(tmp_path)


@pytest.fixture
async def peers(settings: GatewaySettings, files: TLS, tmp_path: Path) -> AsyncIterator[Peers]:
    put(Authority(tmp_path / "old").issue("cluster"), files)
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    async with peers_on(registry, lambda spec: []) as peers:
        peers.security = Security(tls=files)
        await peers.add_decode()
        yield peers


async def test_a_renewed_certificate_counts_at_the_gateway(
    settings: GatewaySettings, peers: Peers, files: TLS, tmp_path: Path
) -> None:
    async with make_gateway(settings.model_copy(update={"tls": files.ca.parent})) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        put(Authority(tmp_path / "new").issue("cluster"), files)
        await asyncio.sleep(0.5)
        assert gateway.readiness()[0], "a connection that stands goes on"
        await peers.cut("d")
        await eventually(lambda: not gateway.readiness()[0])
        await eventually(lambda: gateway.readiness()[0])
