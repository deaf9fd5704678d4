"""Hugging Face transformers behind /v1/completions, as simply as that is done: one `generate()` after another.

One thread takes the requests that come within GATHER_S of the first as a batch, padded on the left -> `generate()` ->
its streamer hands each step's tokens to the HTTP threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.servers.token_server import NO_TOKEN, Requests, Waiting, serve

MAX_BATCH = 64
GATHER_S = 0.02  # without it the first of many that come at once would be generated alone, before all others


class Fan(BaseStreamer):
    """Hands every step's row of tokens to the batch's requests. The first `put` is the prompt: not for them."""

    def __init__(self, batch: Sequence[Waiting]) -> None:
        self._batch = batch
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            for waiting, token in zip(self._batch, value.tolist(), strict=True):
                waiting.tokens.put(token)
        self._prompt = False

    def end(self) -> None:
        return


def serve_batches(model: Any, waiting: Requests) -> None:
    while True:
        batch = [waiting.get()]
        time.sleep(GATHER_S)
        while len(batch) < MAX_BATCH and not waiting.empty():
            batch.append(waiting.get())
        try:
            generate(model, batch)
        except Exception as error:
            print(f"generate() failed: {error!r}", flush=True)
            for one in batch:
                one.tokens.put(NO_TOKEN)


def generate(model: Any, batch: Sequence[Waiting]) -> None:
    width = max(len(one.prompt) for one in batch)
    ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in batch])
    mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
    steps = max(one.max_tokens for one in batch)
    model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=steps, max_new_tokens=steps, streamer=Fan(batch)
    )


def load(folder: Path) -> Callable[[Requests], None]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.eval()
    return partial(serve_batches, model)


if __name__ == "__main__":
    serve(load, __doc__)
