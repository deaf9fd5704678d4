from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.worker import InlineEngine
from tandem.worker.engine.port import Command


@pytest.fixture
def engine_of(demo_model: Path) -> Callable[[int], Engine]:
    def build(num_blocks: int) -> Engine:
        return Engine(EngineConfig(model_path=demo_model, model_name="demo", num_blocks=num_blocks, num_threads=1))

    return build


def request(name: str, prompt: int = 8, max_tokens: int = 8, priority: int = 0) -> Request:
    return Request(name, list(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens, temperature=0), priority)


@contextmanager
def a_step(engine: InlineEngine) -> Iterator[list[Command]]:
    """A step that computes all the while: what is submitted waits for its end."""
    held, put = list[Command](), engine._put
    engine._put = held.extend
    try:
        yield held
    finally:
        engine._put = put
        put(held)
