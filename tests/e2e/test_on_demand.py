"""Models that have workers only while they are asked for, on real processes: null engines, one model pinned."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.local import free_ports
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster

pytestmark = pytest.mark.long
PINNED, FIRST, SECOND = "pinned", "first", "second"
PROMPT = [5, 6, 7, 8] * 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, config_only: Path) -> Iterator[RunningCluster]:
    """One may be awake, of the two that sleep."""
    models = [f"--model={name}={config_only}" for name in (PINNED, FIRST, SECOND)]
    sleep = [f"--idle-stop={FIRST}=1h", f"--idle-stop={SECOND}=5s", "--awake-models=1"]
    folder = tmp_path_factory.mktemp("sleepers")
    options = [*models, *sleep, "--engine=null", "--null-speedup=10", "--prefill=0", f"--prefill={FIRST}=1"]
    with running_cluster(folder, *options, "--gateways=2", f"--own-http-port={free_ports(2)[0]}") as cluster:
        yield cluster


def ask(
    cluster: RunningCluster, model: str, seconds: float = BOUND_S, max_tokens: int = 3, **more: object
) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, **more}
    headers = {"x-request-timeout": str(seconds)}
    return httpx.post(f"{cluster.http}/v1/completions", json=body, headers=headers, timeout=2 * BOUND_S)


def states(cluster: RunningCluster) -> dict[str, str]:
    cards = httpx.get(f"{cluster.http}/v1/models", timeout=10.0).json()["data"]
    return {card["id"]: card["state"] for card in cards}


def workers(cluster: RunningCluster) -> set[str]:
    """Models that have processes."""
    found = set()
    for child in psutil.Process(cluster.process.pid).children():
        words = child.cmdline() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE else []
        found |= {word.partition("=")[2] for word in words if word.startswith("--model-name=")}
    return found


def parts_of_starts(cluster: RunningCluster, worker: str) -> set[str]:
    """Parts of its start that a worker says have taken some time, or none."""
    found = set()
    for target in httpx.get(f"{cluster.http}/metrics/targets", timeout=10.0).json():
        for address in target["targets"]:
            lines = httpx.get(f"http://{address}/metrics", timeout=10.0).text.splitlines()
            mine = [line for line in lines if line.startswith("tandem_cold_start_seconds{") and f'"{worker}"' in line]
            found |= {line.partition('part="')[2].partition('"')[0] for line in mine if float(line.split()[-1]) >= 0}
    return found


def test_a_model_sleeps_until_it_is_asked_for_and_the_other_makes_room(cluster: RunningCluster) -> None:
    assert states(cluster) == {PINNED: "ready", FIRST: "asleep", SECOND: "asleep"}
    assert workers(cluster) == {PINNED}
    assert ask(cluster, PINNED).status_code == 200
    answer = ask(cluster, FIRST)
    assert answer.status_code == 200, answer.text
    assert float(answer.headers["x-tandem-woken-after-s"]) > 0.1
    assert answer.headers["x-tandem-decode-worker"] == f"{FIRST}-decode-0"
    assert workers(cluster) == {PINNED, FIRST}
    prefill, parts = f"{FIRST}-prefill-0", {"process", "weights", "kernels", "link"}
    eventually(lambda: parts_of_starts(cluster, prefill) == parts, BOUND_S, "it may start after the answer")
    again = ask(cluster, FIRST)
    assert (again.status_code, "x-tandem-woken-after-s" in again.headers) == (200, False)
    other = ask(cluster, SECOND)
    assert other.status_code == 200, other.text
    assert workers(cluster) == {PINNED, SECOND}
    assert states(cluster)[FIRST] == "asleep"
    eventually(lambda: workers(cluster) == {PINNED}, BOUND_S, "what is idle for its time stops")
    eventually(lambda: states(cluster)[SECOND] == "asleep", 10.0, "and is said to")


def test_a_stream_says_how_far_it_is(cluster: RunningCluster) -> None:
    stream = ask(cluster, FIRST, stream=True, ignore_eos=True, stream_options={"include_usage": True})
    lines = stream.text.splitlines()
    said = [line for line in lines if line.startswith(f": {FIRST} is starting, about ")]
    assert said
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert [choice["finish_reason"] for choice in chunks[-2]["choices"]] == ["length"]


def test_where_the_deadline_leaves_no_time_the_seconds_are_told_and_the_next_one_finds_it(
    cluster: RunningCluster,
) -> None:
    began = time.monotonic()
    refused = ask(cluster, SECOND, seconds=0.5)
    assert time.monotonic() < began + 5.0
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert 1 <= int(refused.headers["retry-after"]) <= BOUND_S
    assert f"takes about {refused.headers['retry-after']} s more" in refused.json()["error"]["message"]
    eventually(lambda: states(cluster)[SECOND] == "ready", BOUND_S, "it was asked for all the same")


def test_what_runs_is_ended_before_its_model_makes_room(cluster: RunningCluster) -> None:
    """It has its turn, though another model is waited for."""
    assert ask(cluster, FIRST).status_code == 200
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(ask, cluster, FIRST, max_tokens=900, ignore_eos=True)
        time.sleep(0.5)
        waits = threads.submit(ask, cluster, SECOND, 2 * BOUND_S)
        assert long.result().status_code == 200
        assert long.result().json()["usage"]["completion_tokens"] == 900
        assert "x-tandem-migrated" not in long.result().headers
        assert waits.result().status_code == 200, waits.result().text


def test_the_death_of_the_gateway_that_asked_leaves_nobody_waiting(cluster: RunningCluster) -> None:
    eventually(lambda: workers(cluster) == {PINNED}, BOUND_S, "asleep")
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, cluster, SECOND) for _ in range(4)]
        eventually(lambda: SECOND in workers(cluster), BOUND_S, "it starts")
        (victim, _) = (psutil.Process(pid) for pid in cluster.pids("gateway"))
        victim.send_signal(signal.SIGKILL)
        ends = [one.exception(BOUND_S) or one.result().status_code for one in asking]
    assert all(end == 200 or isinstance(end, httpx.TransportError) for end in ends), ends
    eventually(lambda: ask(cluster, SECOND).status_code == 200, BOUND_S, "it is served by the other")


def test_a_start_that_fails_is_told_and_not_tried_hotly(tmp_path: Path, config_only: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(
        (config_only / "config.json").read_text(encoding="utf-8").replace('"llama"', '"no_such"'), encoding="utf-8"
    )
    options = [f"--model={PINNED}={config_only}", f"--model=broken={broken}", "--idle-stop=broken", "--prefill=0"]
    with running_cluster(tmp_path, *options, "--engine=null") as cluster:
        began = time.monotonic()
        refused = [ask(cluster, "broken") for _ in range(5)]
        assert time.monotonic() < began + BOUND_S
        for one in refused:
            assert (one.status_code, one.json()["error"]["code"]) == (503, "start_failed"), one.text
            assert "no_such" in one.json()["error"]["message"]
            assert int(one.headers["retry-after"]) >= 1
        ends = json.dumps((tmp_path / "up.log").read_text(encoding="utf-8")).count("broken-decode-0 ended with")
        assert ends == 3, "one start, of three tries"
        assert ask(cluster, PINNED).status_code == 200
