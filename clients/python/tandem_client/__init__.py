"""A client of Tandem's gRPC API, plain and asyncio, that needs grpcio and protobuf alone.

    with Client("127.0.0.1:50051") as client:
        answer = client.generate("def ", max_tokens=16)
        with client.stream("def ", timeout_s=5) as parts:
            for part in parts:
                print(part.text)

    async with AsyncClient("127.0.0.1:50051") as client:
        answer = await client.generate("def ", max_tokens=16)
        async with client.stream("def ", timeout_s=5) as parts:
            async for part in parts:
                print(part.text)

A call has one deadline, `timeout_s`, which its retries share. It is called again while nothing of its answer has come:
where the gateway cannot be reached, and where the cluster is full and says when to ask again. A stream that is left or
cancelled ends at the workers, too. Calls join the trace that OpenTelemetry has here, or the one that `traceparent`
names. Errors are grpc.RpcError: `error_code` and `field_violations` read them.
"""

from tandem_client.asynchronous import AsyncClient, AsyncStream
from tandem_client.attempts import Retries
from tandem_client.blocking import Client, Stream
from tandem_client.errors import error_code, field_violations, retry_after_s
from tandem_client.request import Options, Prompt
from tandem_client.stubs.tandem.v1 import llm_pb2
from tandem_client.tracing import new_traceparent, trace_id

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Options",
    "Prompt",
    "Retries",
    "Stream",
    "error_code",
    "field_violations",
    "llm_pb2",
    "new_traceparent",
    "retry_after_s",
    "trace_id",
]
