"""`tandem chat`: talk to a running cluster in the terminal.

you> …            a message; one that begins with three quotation marks continues until three more
the model's text  as it comes, on a terminal its Markdown rendered; Ctrl-C stops this answer and keeps the chat
[what it cost]    tokens per second, first token, path, cached tokens
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx
import openai
from markdown_it import MarkdownIt
from openai import DefaultHttpxClient, OpenAI, omit
from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.markup import escape
from rich.segment import Segment, SegmentLines
from rich.text import Text

from tandem.commands import CONTROLS
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.running import running
from tandem.settings import Settings, load

QUOTES = '"""'
# HTML is shown as text: rich would drop it.
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
HELP = """\
/help            this list
/model [NAME]    the models that are served; talk to another one
/system [TEXT]   what the model is told before anything else; begins anew
/reset           forget the conversation
/exit            or Ctrl-D
Ctrl-C           stop the answer
Begin and end a message of several lines with \"\"\"."""


class ChatSettings(Settings):
    """Talk to a running cluster."""

    model: CliPositionalArg[str] = Field("", description="if not given, the first model that is served")
    url: str = Field(
        "",
        description="the gateway's HTTP address; if not given, that of the newest cluster on this machine, with MODEL "
        f"one that serves it, else {UP_ADDRESSES['gateway_url']}",
    )
    api_key: str = Field("", description="as `tandem keys add` printed it, where the gateway asks for one")
    system: str = Field("", description="what the model is told before anything else")
    max_tokens: int | None = Field(None, ge=1, description="most tokens of an answer")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; if not given, the model's own")
    timeout_s: float = Field(600.0, gt=0, description="bound of one answer")


@dataclass(slots=True)
class Cost:
    """One answer's times, in seconds, and usage."""

    asked_at: float
    first_at: float | None = None
    ended_at: float = 0.0
    usage: Any = None
    stopped: bool = False

    def line(self) -> str:
        if self.first_at is None or self.usage is None:
            return "stopped"
        tokens, rest = self.usage.completion_tokens, max(self.ended_at - self.first_at, 1e-6)
        path = ((self.usage.model_extra or {}).get("tandem") or [{}])[0]
        workers = " -> ".join(filter(None, (path.get("prefill_worker"), path.get("decode_worker"))))
        rate = f"{(tokens - 1) / rest:.1f} tokens/s, " if tokens > 1 else ""
        first = f"first after {self.first_at - self.asked_at:.2f} s"
        cached = f"{path.get('cached_tokens', 0)} of {self.usage.prompt_tokens} prompt tokens cached"
        stopped = "stopped; " if self.stopped else ""
        return f"{stopped}{tokens} tokens, {rate}{first}; {workers} ({path.get('path')}); {cached}"


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the model that they go to."""

    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []


def main(arguments: list[str]) -> None:
    settings = load(ChatSettings, arguments, "tandem chat")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background processes ignore it
    url = settings.url or _url_here(settings.model)
    direct = DefaultHttpxClient(verify=httpx.create_ssl_context(), trust_env=False)  # as gateways.http_client
    client = OpenAI(
        base_url=f"{url}/v1", api_key=settings.api_key or "none", timeout=settings.timeout_s, http_client=direct
    )
    console = Console(highlight=False, soft_wrap=True)
    try:
        served = [model.id for model in client.models.list()]
    except openai.OpenAIError as error:
        raise SystemExit(f"tandem chat: {url}: {error}; start a cluster with `tandem up`") from None
    if settings.model and settings.model not in served:
        raise SystemExit(f"tandem chat: {settings.model!r} is not served; there is {', '.join(served)}")
    chat = Chat(client, console, settings, Conversation(settings.model or served[0], settings.system))
    chat.run(read_line)


def _url_here(model: str) -> str:
    found = [note.http for note in running() if not model or model in note.model.split(", ")]
    return found[-1].split(", ")[0] if found else UP_ADDRESSES["gateway_url"]


def read_line(prompt: str) -> str:
    """Raises EOFError at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - arrow keys and the messages before

    return input(prompt)


class WrittenMarkdown:
    """Shows Markdown while it is written: the last block is redrawn until the next one begins."""

    def __init__(self, console: Console) -> None:
        self._console, self._last, self._first = console, "", True
        self._live = Live(console=console, get_renderable=self._shown, refresh_per_second=10, transient=True)

    def __enter__(self) -> WrittenMarkdown:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._print(len(self._last))

    def add(self, part: str) -> None:
        self._last += part
        if "\n" in part:  # a block ends only with its line
            complete = self._last[: self._last.rindex("\n") + 1]
            starts = [token.map[0] for token in MARKDOWN.parse(complete) if token.map and token.level == 0]
            before = complete.split("\n")[: max(starts, default=0)]
            self._print(sum(len(line) + 1 for line in before))

    def _print(self, length: int) -> None:
        """Print complete blocks above the last one."""
        complete, self._last = self._last[:length], self._last[length:]
        if lines := self._lines(complete):
            self._console.print(SegmentLines(lines, new_lines=True))
            self._first = False

    def _shown(self) -> SegmentLines:
        """Returns as many of the last block's lines as the terminal has room for."""
        return SegmentLines(self._lines(self._last)[-(self._console.height - 1) :], new_lines=True)

    def _lines(self, text: str) -> list[list[Segment]]:
        """Returns the text's lines, with a blank one before them."""
        lines = self._console.render_lines(rendered(text), pad=False)
        full = [at for at, line in enumerate(lines) if any(part.text.strip() for part in line)]
        return [*([] if self._first else [[]]), *lines[full[0] : full[-1] + 1]] if full else []


def rendered(text: str) -> Markdown:
    """Returns Markdown whose lines stay lines and whose links show where they lead."""
    markdown = Markdown("", hyperlinks=False)
    markdown.parsed = MARKDOWN.parse(text)
    for inline in chain.from_iterable(token.children or () for token in markdown.parsed):
        inline.type = "hardbreak" if inline.type == "softbreak" else inline.type
    return markdown


class Chat:
    def __init__(
        self,
        client: OpenAI,
        console: Console,
        settings: ChatSettings,
        conversation: Conversation,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._console, self._settings, self._now = client, console, settings, now
        self._said = conversation
        self._said.reset()

    def run(self, read: Callable[[str], str]) -> None:
        """Chat until the input ends or asks to."""
        self._console.print(f"[bold]{escape(self._said.model)}[/]  /help lists the commands")
        while (line := self._read(read)) is not None:
            if line.startswith("/"):
                if line.split()[0] in ("/exit", "/quit", "/bye"):
                    return
                self._command(*line.split(maxsplit=1))
            elif line:
                self._answer(line)

    def _read(self, read: Callable[[str], str]) -> str | None:
        """Returns a message, perhaps of several lines; None at the end."""
        try:
            line = read("you> ").strip()
            if not line.startswith(QUOTES):
                return line
            lines = [line.removeprefix(QUOTES)]
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(read("...> "))
            return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._console.print("\n/exit or Ctrl-D ends the chat", style="dim")
            return ""

    def _command(self, name: str, rest: str = "") -> None:
        if name == "/model":
            self._choose(rest)
        elif name == "/system":
            self._said.system = rest
            self._said.reset()
        elif name == "/reset":
            self._said.reset()
        else:
            self._console.print(escape(HELP if name == "/help" else f"{name}: no such command\n{HELP}"))

    def _choose(self, name: str) -> None:
        served = [model.id for model in self._client.models.list()]
        if name in served:
            self._said.model = name
        elif name:
            self._console.print(f"{escape(name)} is not served", style="red")
        for one in served:
            self._console.print(f"{'*' if one == self._said.model else ' '} {escape(one)}")

    def _answer(self, text: str) -> None:
        """Answer a message. An answer without a token, failed or stopped, is left out of the conversation."""
        self._said.messages.append({"role": "user", "content": text})
        cost, parts = Cost(self._now()), list[str]()
        try:
            self._stream(cost, parts)
        except KeyboardInterrupt:
            cost.stopped = True
        except openai.OpenAIError as error:
            self._console.print(escape(f"\n{error}"), style="red")
        cost.ended_at = self._now()
        self._console.print(f"\n[dim]\\[{escape(cost.line())}][/]")
        if parts:
            self._said.messages.append({"role": "assistant", "content": "".join(parts)})
        else:
            self._said.messages.pop()

    def _stream(self, cost: Cost, parts: list[str]) -> None:
        """Show and keep the parts as they come."""
        rendered = self._console.is_terminal and not self._console.is_dumb_terminal
        with WrittenMarkdown(Console(file=self._console.file)) if rendered else nullcontext() as markdown:
            for part in self._parts(cost):
                parts.append(part)
                if markdown:
                    markdown.add(part.translate(CONTROLS))
                else:
                    self._console.print(Text(part.translate(CONTROLS)), end="")

    def _parts(self, cost: Cost) -> Iterator[str]:
        most, temperature = self._settings.max_tokens, self._settings.temperature
        messages: Any = self._said.messages
        usage: Any = {"include_usage": True, "continuous_usage_stats": True}  # for stopped answers, too
        stream = self._client.chat.completions.create(
            model=self._said.model, messages=messages, stream=True, stream_options=usage,
            max_tokens=omit if most is None else most, temperature=omit if temperature is None else temperature,
        )  # fmt: skip
        with stream:
            for chunk in stream:
                cost.usage = chunk.usage or cost.usage
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    cost.first_at = cost.first_at or self._now()
                    yield text
