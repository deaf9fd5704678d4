"""Connecting to a Ray cluster: waits for its head, with one line of output, before Ray's own client tries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray._private.services import canonicalize_bootstrap_address_or_die, find_gcs_addresses
from ray.exceptions import RayError, RuntimeEnvSetupError

from tandem import rpc

LOOK_S, ANSWER_S = 0.5, 2.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def connect(
    address: str,
    namespace: str,
    runtime_env: Mapping[str, Any] | None = None,
    *,
    wait_s: float = 20.0,
    report: Callable[[str], None] = print,
) -> None:
    """Connects to the Ray cluster at `address`.

    "auto": this machine's; "local": one started here that ends with this process.

    Actors that are started later have `runtime_env`.

    Raises:
        ConnectionError: there is no cluster, or it does not answer within `wait_s`.
        ValueError: Ray does not take the address or the runtime_env.
    """
    if address != "local":
        address = await _head(address, wait_s, report)
    try:
        ray.init(
            address=address, namespace=namespace, runtime_env=dict(runtime_env or {}), ignore_reinit_error=True,
            log_to_driver=False, configure_logging=False,
        )  # fmt: skip
    except (TypeError, ValueError, RuntimeEnvSetupError) as error:
        raise ValueError(f"ray.runtime_env: {error}") from None
    except (RuntimeError, RayError) as error:
        raise ConnectionError(f"Ray's head at {address} answers, but: {' '.join(str(error).split())}") from None


async def _head(address: str, wait_s: float, report: Callable[[str], None]) -> str:
    """Returns the address of a head that answers.

    Without an answer Ray's client would end this process with a page of text.
    """
    said = False
    try:
        async with asyncio.timeout(wait_s):
            while not await _answers(found := _found(address)):
                if not said:
                    said = True
                    report(f"waits for Ray's head at {found or address}, for {wait_s:g} s at most")
                await asyncio.sleep(LOOK_S)
            return found
    except TimeoutError:
        raise ConnectionError(
            f"Ray's head at {address} did not answer within {wait_s:g} s; `ray start --head` starts one"
        ) from None


def _found(address: str) -> str:
    """Returns host and port of the head; "" while none is known."""
    find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    try:
        return str(canonicalize_bootstrap_address_or_die(address))
    except ConnectionError:
        return ""


async def _answers(address: str) -> bool:
    """True if a gRPC server answers there; a refusal is an answer."""
    if not address:
        return False
    async with rpc.channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return error.code() not in NO_ANSWER
    return True
