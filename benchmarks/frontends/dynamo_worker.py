"""A worker of Dynamo's without an engine, run by the Python of Dynamo's environment: model folder, token ids.

It keeps time by itself: a request's seed says how long its steps are (`Pace.seeds`)."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model  # type: ignore[import-not-found]
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]


async def generate(request: dict[str, Any], context: object) -> AsyncIterator[dict[str, Any]]:
    letters = [int(token) for token in sys.argv[2].split(",")]
    count, seed = request["stop_conditions"]["max_tokens"], request["sampling_options"].get("seed") or 0
    step_s = seed // 1_000_000 / 1000
    for index in range(count):
        last = index + 1 == count
        yield {"token_ids": [letters[index % len(letters)]], "finish_reason": "length" if last else None}
        if not last:
            await asyncio.sleep(step_s - time.perf_counter() % step_s if step_s else 0)


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("null.backend.generate")
    name = sys.argv[1].rstrip("/").rpartition("/")[2]
    await register_model(
        ModelInput.Tokens, ModelType.Completions, endpoint, sys.argv[1], name, worker_type=WorkerType.Aggregated
    )
    await endpoint.serve_endpoint(generate, graceful_shutdown=False)


if __name__ == "__main__":
    uvloop.run(main())
