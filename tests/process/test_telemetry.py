"""Logs of a process: each line is an event, gRPC's too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from subprocess import PIPE

import pytest

from tandem.local import free_ports

# A call that is under way when its server goes: gRPC's core has something to say then. The server is another process,
# for its own end may print a traceback of the call that it cuts.
SERVES = """
import asyncio
import sys
import grpc
from grpc import aio

class Silent(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            await asyncio.sleep(60)
        return grpc.unary_unary_rpc_method_handler(answer)

async def main():
    server = aio.server()
    server.add_generic_rpc_handlers([Silent()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.readline)
    await server.stop(0)
    await asyncio.sleep(1)  # what it says is sent before it ends

asyncio.run(main())
"""
ASKS = """
import asyncio
import sys
import services
import structlog
from grpc import aio
from tandem.process import telemetry

async def main():
    async with aio.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
        call = channel.unary_unary("/any/Call")(b"", wait_for_ready=True)
        await asyncio.sleep(0.5)
        print(flush=True)
        try:
            await call
        except aio.AioRpcError:
            structlog.get_logger().info("lost")

logs = telemetry.set_up("s", "i")
asyncio.run(main())
logs.close()
"""
EXPORTS = """
from opentelemetry import trace
from tandem.process import telemetry

held = telemetry.set_up("s", "i", traces=telemetry.Traces.BEGUN)
with trace.get_tracer("t").start_as_current_span("s"):
    pass
held.close()
"""


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_not_there_is_an_event(protocol: str) -> None:
    [port] = free_ports(1)
    said = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }  # fmt: skip
    exports = [sys.executable, "-c", EXPORTS]
    done = subprocess.run(exports, env=os.environ | said, capture_output=True, encoding="utf-8", timeout=60, check=True)
    events = [json.loads(line)["event"] for line in (done.stdout + done.stderr).splitlines()]
    assert any("export" in event for event in events), events


def test_no_plain_line_of_grpc_stands_between_events() -> None:
    said = {
        name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"
    }  # by Ray, where it is imported
    serves = [sys.executable, "-c", SERVES]
    with subprocess.Popen(serves, stdin=PIPE, stdout=PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        asks = [sys.executable, "-c", ASKS, server.stdout.readline().decode().strip()]
        done = subprocess.run(
            asks, env=said, stdout=server.stdin, stderr=PIPE, encoding="utf-8", timeout=60, check=True
        )
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["lost"]
