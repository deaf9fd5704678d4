"""`python -m services.gateway`: HTTP/SSE and gRPC in, tokens out, until SIGTERM, SIGINT or the death of any task."""

import asyncio
import gc
import random
import signal
import time
from uuid import uuid4

import uvloop

from services.gateway.routing import Router
from services.gateway.server import Gateway
from services.gateway.settings import GatewaySettings
from tandem import telemetry
from tandem.settings import load


def main() -> None:
    settings = load(GatewaySettings, program="python -m services.gateway")
    traces = telemetry.set_up("tandem-gateway", f"gateway-{settings.http_port}", settings.log_level)
    try:
        uvloop.run(serve(settings))
    except (OSError, ValueError) as error:
        raise SystemExit(f"gateway: {error}") from error
    finally:
        traces.close()


async def serve(settings: GatewaySettings, make_router: type[Router] = Router) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    Raises:
        OSError | ValueError: it could not start.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with make_gateway(settings, make_router) as gateway:
        # What a gateway is made of stays until it ends: looking for garbage there would stop all requests for long.
        gc.collect()
        gc.freeze()
        stopping, failed = asyncio.create_task(stop.wait()), asyncio.create_task(gateway.failed())
        await asyncio.wait({stopping, failed}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if failed.done():
            failed.result()
        failed.cancel()


def make_gateway(settings: GatewaySettings, make_router: type[Router] = Router) -> Gateway:
    """One that lives in this process: real time, and names and seeds that nobody can guess."""
    return Gateway(
        settings, new_id=lambda: uuid4().hex, seeds=random.SystemRandom(), wall=time.time, make_router=make_router
    )


if __name__ == "__main__":
    main()
