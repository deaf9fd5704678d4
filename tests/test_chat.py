"""Answers of `tandem chat` on a terminal: their Markdown, and what no text of a model may do there."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

ROWS, COLUMNS, BOUND_S = 12, 60, 60.0
ANSWER = """# A *list*

- **bold** and `co*d*e`
  - inner, a <b>tag</b>

One line
and the next, [here](http://else.where)
\x1b]0;title\x07\x1b[2J\x9b31mhostile

| a | b |
|---|---|
| 1 | 2 |

```python
""" + "".join(f"line = {number}\n" for number in range(30))  # a fence that nobody closes, longer than the terminal
CODE = re.compile(r"\x1b\[([?\d;]*)([a-zA-Z])")


class TerminalLines:
    """A terminal's lines, also those that have scrolled away; what is bold or blue is not kept."""

    def __init__(self) -> None:
        self.lines, self._row, self._column, self.unknown = [""], 0, 0, set[str]()

    def write(self, text: str) -> None:
        for plain, amount, letter in re.findall(rf"([^\x1b]+)|{CODE.pattern}", text):
            for character in plain:
                self._put(character)
            if letter == "A":
                assert self._row - int(amount) >= len(self.lines) - ROWS, "moved above the terminal"
                self._row -= int(amount)
            elif letter == "K":
                self.lines[self._row] = ""
            elif letter not in "mhl":
                self.unknown.add(letter)

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row += 1
            self.lines += [""] * (self._row == len(self.lines))
        elif character == "\r":
            self._column = 0
        else:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1


@contextmanager
def gateway_that_says(parts: Sequence[str], pause_s: float = 0.0) -> Iterator[str]:
    """Yields the URL of a server that streams one answer to every chat."""

    class OneAnswer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(
                json.dumps({"object": "list", "data": [{"id": "model", "object": "model"}]}), "application/json"
            )

        def do_POST(self) -> None:
            chunks = [
                {"choices": [{"index": 0, "delta": {"content": part}}], "object": "chat.completion.chunk"}
                for part in parts
            ]
            self._answer("", "text/event-stream")
            for said in [*map(json.dumps, chunks), "[DONE]"]:
                time.sleep(pause_s)
                self.wfile.write(f"data: {said}\n\n".encode())

        def _answer(self, body: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def command(url: str) -> list[str]:
    return [sys.executable, "-m", "tandem", "chat", f"--url={url}"]


def on_a_terminal(url: str) -> str:
    """Returns what one message and its answer write to a terminal."""
    own, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    sizes = ("COLUMNS", "LINES")  # which would count more than the terminal's own
    environment = {name: value for name, value in os.environ.items() if name not in sizes} | {"TERM": "xterm-256color"}
    with subprocess.Popen(command(url), env=environment, stdin=other, stdout=other, stderr=other) as process:
        os.close(other)
        os.write(own, b"hello\r/exit\r")
        shown, end = b"", time.monotonic() + BOUND_S
        try:
            while process.poll() is None or select.select([own], [], [], 0)[0]:
                assert time.monotonic() < end, shown
                if select.select([own], [], [], 0.1)[0]:
                    shown += os.read(own, 65536)
        except OSError:  # its end: nobody has the other side any more
            pass
        finally:
            process.kill()
    os.close(own)
    return shown.decode()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_markdown_is_rendered_while_it_is_written(size: int) -> None:
    parts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    with gateway_that_says(parts, 0.002) as url:
        screen = TerminalLines()
        screen.write(on_a_terminal(url))
    lines = [line.strip() for line in screen.lines]
    text = "\n".join(lines)
    assert screen.unknown == set()
    assert (
        "\nA list\n\n• bold and co*d*e\n• inner, a <b>tag</b>\n\nOne line\nand the next, here (http://else.where)"
        in text
    )
    assert "]0;title[2J31mhostile" in text
    assert [line for line in lines if line.startswith("line = ")] == [f"line = {number}" for number in range(30)]


def test_no_text_commands_the_terminal() -> None:
    hostile = "".join(map(chr, [*range(32), *range(127, 160)]))
    for answer in (
        hostile,
        f"```\n{hostile}\n```\n",
        f"[{hostile}]({hostile})\n\n# {hostile}\n\n| {hostile} |\n|--|\n",
    ):
        with gateway_that_says([*answer]) as url:
            shown = on_a_terminal(url).partition("hello\r\n")[2]
        assert set(CODE.sub("", shown)) & {*hostile} <= {"\n", "\r", "\t"}
        assert {letter for _, letter in CODE.findall(shown)} <= {*"mAKhl"}


def test_what_is_no_terminal_has_the_text_as_it_is() -> None:
    with gateway_that_says(["# A *li", "st*\n- **bold**"]) as url:
        said = subprocess.run(
            command(url), input="hello\n", capture_output=True, text=True, encoding="utf-8", timeout=BOUND_S, check=True
        )
    assert "you> # A *list*\n- **bold**\n[stopped]\n" in said.stdout
