"""Hugging Face transformers behind /v1/completions, as simply as that is done: one `generate()` after another.

HTTP threads put requests into a queue -> one thread takes those that come within GATHER_S of the first as a batch,
padded on the left -> `generate()` -> its streamer hands each step's tokens to the HTTP threads, which write them as
server-sent events.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

MAX_BATCH = 64
GATHER_S = 0.02  # without it the first of many that come at once would be generated alone, before all others
STEP_BOUND_S = 300.0
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request and the queue of its tokens, one a step; NO_TOKEN where `generate()` failed."""

    prompt: list[int]
    max_tokens: int
    tokens: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def stream(self) -> Iterator[int]:
        for _ in range(self.max_tokens):
            yield self.tokens.get(timeout=STEP_BOUND_S)


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


def serve_batches(model: Any, waiting: queue.SimpleQueue[Waiting]) -> None:
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


class Door(BaseHTTPRequestHandler):
    """One connection; `server.waiting` is where its request goes."""

    def do_GET(self) -> None:
        self._head("application/json")
        self.wfile.write(json.dumps({"data": [{"id": self.server.model_name}]}).encode())  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        waiting = Waiting(body["prompt"], body["max_tokens"])
        self.server.waiting.put(waiting)  # type: ignore[attr-defined]
        self._head("text/event-stream")
        for token in waiting.stream():
            if token == NO_TOKEN:
                self._event({"error": "generate() failed; see the log"})
                return
            self._event({"choices": [{"index": 0, "text": "", "token_ids": [token]}]})
        self._event({"choices": [], "usage": usage(waiting)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        return


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, model_name: str) -> None:
        super().__init__(("127.0.0.1", port), Door)
        self.model_name = model_name
        self.waiting: queue.SimpleQueue[Waiting] = queue.SimpleQueue()


def usage(waiting: Waiting) -> dict[str, int]:
    return {"prompt_tokens": len(waiting.prompt), "completion_tokens": waiting.max_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    model.eval()
    server = Server(options.port, options.model.name)
    threading.Thread(target=serve_batches, args=(model, server.waiting), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
