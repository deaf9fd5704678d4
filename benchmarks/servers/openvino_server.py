"""OpenVINO GenAI's continuous batching behind /v1/completions; runs in the peer's own environment.

One thread hands new requests to the pipeline between its steps, and each step's tokens to the HTTP threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.servers.token_server import Requests, Waiting, serve

CACHE_GB = 1


def serve_steps(pipeline: Any, waiting: Requests) -> None:
    from openvino import Tensor
    from openvino_genai import GenerationConfig

    running: dict[int, tuple[Waiting, Any]] = {}
    numbers = count()
    while True:
        while not running or not waiting.empty():
            one, number = waiting.get(), next(numbers)
            greedy = GenerationConfig(max_new_tokens=one.max_tokens, ignore_eos=True, do_sample=False)
            running[number] = one, pipeline.add_request(number, Tensor(_row(one.prompt)), greedy)
        pipeline.step()
        for number, (one, handle) in list(running.items()):
            while handle.can_read():
                for token in handle.read().popitem()[1].generated_ids:
                    one.tokens.put(token)
            if handle.get_status().name != "RUNNING":
                del running[number]


def _row(prompt: list[int]) -> Any:
    import numpy

    return numpy.array([prompt], dtype=numpy.int64)


def load(model: Path) -> Callable[[Requests], None]:
    from openvino_genai import ContinuousBatchingPipeline, SchedulerConfig

    scheduling = SchedulerConfig()
    scheduling.cache_size, scheduling.enable_prefix_caching, scheduling.dynamic_split_fuse = CACHE_GB, True, True
    properties = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)), "INFERENCE_PRECISION_HINT": "bf16"}
    return partial(serve_steps, ContinuousBatchingPipeline(str(model), scheduling, "CPU", properties))


if __name__ == "__main__":
    serve(load, __doc__)
