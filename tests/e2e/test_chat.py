"""`tandem up -d`, `ps`, `chat` and `down`, as a person at a terminal would use them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.commands.clusters.running import RunningNote
from tandem.commands.up import DEMO_MODEL
from tandem.local import free_ports

BOUND_S = 120.0


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return os.environ | {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}


def tandem(state: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, env=state, capture_output=True, encoding="utf-8", timeout=2 * BOUND_S, check=False)


@pytest.fixture(scope="module")
def url(state: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a cluster that was left running, whose answers take their time."""
    http, grpc, redis = free_ports(3)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--redis-port={redis}", "--engine=null")
    started = tandem(state, "up", "-d", *ports, f"--logs={tmp_path_factory.mktemp('logs')}", str(DEMO_MODEL))
    assert started.returncode == 0, started.stderr
    assert "Tandem is ready" in started.stdout
    assert "`tandem down` stops everything." in started.stdout
    yield f"http://127.0.0.1:{http}"
    tandem(state, "down", "--all")


class Terminal:
    """`tandem chat` on a terminal of its own."""

    def __init__(self, state: dict[str, str], *arguments: str) -> None:
        self._own, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "chat", *arguments], env=state | {"TERM": "dumb"},
            stdin=other, stdout=other, stderr=other, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def until(self, pattern: str) -> str:
        """Waits for a text; returns what was shown up to it, which later calls do not see again."""
        end = time.monotonic() + BOUND_S
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self._own], [], [], 1.0)[0]:
                self.shown += os.read(self._own, 4096).decode(errors="replace")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before


def test_what_runs_is_listed(url: str, state: dict[str, str]) -> None:
    listed = tandem(state, "ps").stdout
    assert "tandem-demo" in listed
    assert url in listed
    assert "1 prefill, 1 decode" in listed


def test_a_conversation(url: str, state: dict[str, str]) -> None:
    chat = Terminal(state, "tandem-demo", "--max-tokens=12", "--temperature=0")  # the cluster that runs here
    chat.until("you> ")
    chat.type("/help\r")
    assert "/system" in chat.until("you> ")
    chat.type("def add(a, b):\r")
    first = chat.until(
        r"\[(\d+) tokens, .*first after [\d.]+ s; .*decode-0 \((local|remote)\); \d+ of \d+ prompt tokens"
    )
    chat.until("you> ")
    chat.type("/reset\r")
    chat.until("you> ")
    chat.type('"""def add(a,\r')
    chat.until(r"\.\.\.> ")
    chat.type(' b):"""\r')
    assert "12 tokens" in chat.until(r"cached\]") or "tokens" in first
    chat.until("you> ")
    chat.type("/model nothing\r")
    assert "nothing is not served" in chat.until(r"\* tandem-demo")
    chat.until("you> ")
    chat.type("/exit\r")
    assert chat.process.wait(BOUND_S) == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(url: str, state: dict[str, str]) -> None:
    chat = Terminal(state, f"--url={url}", "--max-tokens=1900", "--temperature=1.2")
    chat.until("you> ")
    chat.type("import os\r")
    chat.until(r"import os\r\n.")  # the answer has begun
    chat.process.send_signal(signal.SIGINT)
    chat.until(r"\[stopped; \d+ tokens, .*cached\]")
    chat.until("you> ")
    chat.type("/exit\r")
    assert chat.process.wait(BOUND_S) == 0


@pytest.mark.long
def test_who_is_not_there_is_named(url: str, state: dict[str, str]) -> None:
    refused = tandem(state, "chat", "nothing", f"--url={url}")
    assert refused.stderr.strip() == "tandem chat: 'nothing' is not served; there is tandem-demo"
    away = tandem(state, "chat", "--url=http://127.0.0.1:1")
    assert "http://127.0.0.1:1" in away.stderr
    assert "start a cluster with `tandem up`" in away.stderr


def test_down_of_several_asks_which(url: str, state: dict[str, str]) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            started = int(Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
            said = {"model": "other", "http": "", "grpc": "", "workers": "", "logs": ""}
            note = RunningNote(pid=other.pid, started=started, **said).model_dump_json()
            Path(state["XDG_STATE_HOME"], "tandem", "running", f"{other.pid}.json").write_text(note, encoding="utf-8")
            asked = tandem(state, "down")
            assert asked.returncode == 1
            assert "which one? --pid=PID, or --all" in asked.stderr
            assert re.search(rf"^ *{other.pid} +other", asked.stderr, re.MULTILINE)  # ids may differ in length
            assert other.poll() is None
            assert tandem(state, "down", f"--pid={other.pid}").stdout == f"stopped other ({other.pid})\n"
        finally:
            other.kill()
    assert url in tandem(state, "ps").stdout


@pytest.mark.long
def test_down_ends_it_and_leaves_nothing(url: str, state: dict[str, str]) -> None:
    listed = tandem(state, "ps").stdout
    pid = int(re.findall(r"^ *(\d+)", listed, re.MULTILINE)[0])
    below = psutil.Process(pid).children(recursive=True)
    assert below
    assert tandem(state, "down").stdout.startswith("stopped tandem-demo")
    assert (
        not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )  # of whom nobody waits for
    assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert "no cluster runs" in tandem(state, "ps").stdout
    assert "no such cluster runs" in tandem(state, "down").stderr
