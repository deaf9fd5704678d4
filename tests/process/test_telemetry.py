"""Logs of a process: each line is an event, gRPC's too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# A call that is under way when its server goes: gRPC's core has something to say then.
GOES_AWAY = """
import asyncio
import services
import grpc
import structlog
from grpc import aio
from tandem.process import telemetry

class Silent(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            await asyncio.sleep(60)
        return grpc.unary_unary_rpc_method_handler(answer)

async def main():
    server = aio.server()
    server.add_generic_rpc_handlers([Silent()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/any/Call")(b"", wait_for_ready=True)
        await asyncio.sleep(0.5)
        await server.stop(0)
        try:
            await call
        except aio.AioRpcError:
            structlog.get_logger().info("lost")

logs = telemetry.set_up("s", "i")
asyncio.run(main())
logs.close()
"""


def test_no_plain_line_of_grpc_stands_between_events() -> None:
    said = {
        name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"
    }  # by Ray, where it is imported
    command = [sys.executable, "-c", GOES_AWAY]
    done = subprocess.run(command, env=said, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["lost"]
