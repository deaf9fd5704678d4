"""/v1/completions in front of a library that generates token ids: the least HTTP that benchmarks.load.http can read.

HTTP threads put requests into a queue, from which the library's one thread takes them; each then waits for its tokens,
one a step, and writes them as server-sent events.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

STEP_BOUND_S = 300.0
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request and the queue of its tokens, one a step; NO_TOKEN where generating failed."""

    prompt: list[int]
    max_tokens: int
    tokens: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def stream(self) -> Iterator[int]:
        for _ in range(self.max_tokens):
            yield self.tokens.get(timeout=STEP_BOUND_S)


Requests: TypeAlias = "queue.SimpleQueue[Waiting]"


class TokenHandler(BaseHTTPRequestHandler):
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
                self._event({"error": "generating failed; see the log"})
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


class TokenServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, model_name: str) -> None:
        super().__init__(("127.0.0.1", port), TokenHandler)
        self.model_name = model_name
        self.waiting: Requests = queue.SimpleQueue()


def usage(waiting: Waiting) -> dict[str, int]:
    return {"prompt_tokens": len(waiting.prompt), "completion_tokens": waiting.max_tokens}


def serve(load: Callable[[Path], Callable[[Requests], None]], description: str | None) -> None:
    """Serves the model of the command line: `load` gives what takes requests from a queue, for ever."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    generate = load(options.model)
    server = TokenServer(options.port, options.model.name)
    threading.Thread(target=generate, args=(server.waiting,), daemon=True).start()
    server.serve_forever()
