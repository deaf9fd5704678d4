"""`python -m services.gateway`: HTTP/SSE and gRPC in, tokens out, until SIGTERM, SIGINT or the death of any task."""

from tandem.machine.garbage import settled, starting
from tandem.machine.home import provide_home

if __name__ == "__main__":
    starting()
    provide_home()

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import uvloop

from services.gateway import bodies
from services.gateway.access import Access
from services.gateway.door import HttpServer, Room, raise_limit
from services.gateway.model import HELPER_MODULES, ModelFolders, ModelReader
from services.gateway.ports import GatewayPorts, Tune, no_tuning
from services.gateway.routing import Router
from services.gateway.server import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry import RequestRecords
from tandem import rpc
from tandem.checkpoints import TextFiles
from tandem.containment import Sandbox
from tandem.ids import RandomIds
from tandem.liveness import CpuPressure, dead_here
from tandem.process import ends_where_it_stands_still, telemetry
from tandem.registry import Registry
from tandem.settings import load
from tandem.store import Store

# The longest that a request waits for a silent Redis before it is routed without.
REGISTRY_WAIT_S = 0.5
# The longest that an answer waits to be kept, and a request for the items it continues.
STORE_WAIT_S = 1.0
# The longest that a chat waits to be rendered, which takes a millisecond unless the machine is starved.
RENDER_WAIT_S = 60.0
# The longest that a client may take over a request's head. Between two requests its connection is kept for 75 s.
HEADER_TIMEOUT_S = 30.0
# How long the reservations of a dead gateway stay.
RESERVATIONS_LEASE_S = 2.0


def main() -> None:
    # Prompts are tokenized on the loop, long ones on one thread, so the tokenizer's own pool of threads is off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = load(GatewaySettings, program="python -m services.gateway")
    traces = telemetry.set_up(
        "tandem-gateway",
        f"gateway-{settings.own_http_port or settings.http_port or os.getpid()}",
        settings.log_level,
        telemetry.Traces.BEGUN,
        _dumps,
    )
    try:
        uvloop.run(serve(settings, traces))
    except (OSError, ValueError) as error:
        raise SystemExit(f"gateway: {error}") from error
    finally:
        traces.close()


async def serve(settings: GatewaySettings, own: telemetry.Telemetry, make_router: type[Router] = Router) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    Raises:
        OSError | ValueError: it could not start.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gateway = make_gateway(settings, own.recent, own.tune, make_router, RequestRecords(together=own.together))
    async with ends_where_it_stands_still(), gateway:
        settled()
        stopping, failed = asyncio.create_task(stop.wait()), asyncio.create_task(gateway.failed())
        await asyncio.wait({stopping, failed}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if failed.done():
            failed.result()
        failed.cancel()


def make_gateway(
    settings: GatewaySettings, recent: telemetry.RecentSpans | None = None, tune: Tune = no_tuning,
    make_router: type[Router] = Router, records: RequestRecords | None = None,
) -> Gateway:  # fmt: skip
    """Returns a gateway of this process: real time and sockets, ids and seeds that cannot be guessed.

    Raises:
        OSError | ValueError: the Redis URL or the file of API keys is malformed.
    """
    room = Room.of(raise_limit())
    http = partial(HttpServer, header_timeout_s=HEADER_TIMEOUT_S, most=room.http // (1 + settings.shares_ports))
    connect = partial(rpc.channel, security=settings.security)
    sandbox = Sandbox((*bodies.MODULES, "tandem.grammar"))
    untrusted = Sandbox(HELPER_MODULES, stays=True, wait_s=RENDER_WAIT_S)
    ports = GatewayPorts(
        registry=_registry(settings),
        connect=connect,
        read_model=ModelReader(settings, ModelFolders(connect, TextFiles()), untrusted, time.time),
        serve=partial(
            rpc.serve, max_receive_bytes=settings.max_body_bytes, shared_port=settings.shares_ports,
            max_connections=room.grpc,
        ),
        serve_http=http,
        new_id=RandomIds(),
        seeds=random.SystemRandom(),
        wall=time.time,
        hostname=socket.gethostname(),
        pressure=CpuPressure(),
        dead_here=dead_here,
        sandbox=sandbox,
        helpers=(sandbox, untrusted),
        store=Store(settings.store_url, settings.namespace, STORE_WAIT_S) if settings.store_url else None,
        access=Access(settings.api_keys, settings.share_prefixes),
        recent=recent or telemetry.RecentSpans(), tune=tune, records=records or RequestRecords(),
    )  # fmt: skip
    return Gateway(settings, ports, make_router)


def _dumps(event: Any, default: Callable[[Any], Any]) -> str:
    """Returns what json.dumps returns, by orjson where it can: it takes no integer above 64 bits and no lone
    surrogate.
    """
    try:
        return orjson.dumps(event, default).decode()
    except TypeError:
        return json.dumps(event, default=default)


def _registry(settings: GatewaySettings) -> Registry:
    waits = {"timeout": REGISTRY_WAIT_S, "client_lease_s": RESERVATIONS_LEASE_S}
    return Registry.connect(settings.redis_url, namespace=settings.namespace, **waits)


if __name__ == "__main__":
    main()
