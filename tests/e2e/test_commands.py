"""The `tandem` command against a running cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import httpx
import psutil
import pytest

from tandem import __version__
from tandem.cli import COMMANDS, USAGE
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.doctor import DoctorSettings
from tandem.commands.generate import GenerateSettings
from tandem.commands.up import UpSettings
from tandem.local import free_ports
from tandem.settings import Settings
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem", *arguments], capture_output=True, encoding="utf-8", timeout=200
    )


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command in this process; its exit status, output and errors."""

    def said(command: str, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            resolve_name(f"tandem.commands.{COMMANDS[command]}")(list(arguments))
        code = ended.value.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        return (code if isinstance(code, int) else 1, *capsys.readouterr())

    return said


def test_generate_streams_an_answer(shm_cluster: RunningCluster) -> None:
    result = tandem("generate", "import ", "--address", shm_cluster.grpc, "--max-tokens=12", "--temperature=0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("import ")
    assert len(result.stdout) > len("import \n")
    assert "prefill-0 -> decode-0" in result.stderr


def test_the_lines_to_try_run_as_they_are_printed(shm_cluster: RunningCluster) -> None:
    said = (shm_cluster.logs.parent / "up.log").read_text(encoding="utf-8").partition("from another terminal:")[2]
    commands = re.findall(r"^  (\S(?:.*\\\n)*.*)$", said, re.MULTILINE)
    assert [Path(command.split()[0]).name for command in commands[:3]] == ["curl", "python", "tandem"]
    for command in commands[:3]:
        done = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8", timeout=90)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), command
        assert not done.stdout.startswith('{"error"'), done.stdout  # a random model may write the word itself
    assert " chat --url http://127.0.0.1:" in commands[3]
    page = httpx.get(commands[4].split()[0], timeout=60)
    assert page.status_code == 200


def test_the_example_runs(shm_cluster: RunningCluster) -> None:
    example = Path(__file__).parents[2] / "examples" / "generate.py"
    done = subprocess.run(
        [sys.executable, example, shm_cluster.grpc], capture_output=True, encoding="utf-8", timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "by decode-0" in done.stdout
    assert "{'temperature': " in done.stdout


def test_generate_says_what_is_wrong(here: Said) -> None:
    status, out, err = here("generate", "x", "--model=any", "--address=127.0.0.1:1", "--timeout-s=2")
    assert (status, out) == (1, "")
    assert "UNAVAILABLE" in err or "DEADLINE_EXCEEDED" in err


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("ps",)])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "tandem", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=200,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_a_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m tandem --help >&-"
    result = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, encoding="utf-8", timeout=200)
    assert (result.returncode, result.stderr) == (0, "")


def test_generate_chats_and_stops(shm_cluster: RunningCluster) -> None:
    options = ["--address", shm_cluster.grpc, "--chat", "--max-tokens=40", "--top-p=0.9", "--seed=1"]
    whole = tandem("generate", "import os", *options)
    assert whole.returncode == 0, whole.stderr
    assert not whole.stdout.startswith("import os")
    stop = whole.stdout.strip()[3:6]
    result = tandem("generate", "import os", *options, f"--stop={stop}", "--stop=never written")
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip("\n") == whole.stdout.partition(stop)[0]


def test_doctor_finds_a_whole_cluster_whole(shm_cluster: RunningCluster) -> None:
    addresses = [f"--gateway-url={shm_cluster.http}", f"--grpc-address={shm_cluster.grpc}"]
    result = tandem("doctor", "--integrity", f"--redis-url={shm_cluster.redis_url}", *addresses)
    assert result.returncode == 0, result.stdout + result.stderr
    for what in ("prefill-0 -> decode-0", "gateway, HTTP", f"{shm_cluster.grpc}: serving tandem-demo"):
        assert what in result.stdout
    for whole in ("redis", "prefill-0", "decode-0", "gateway"):
        assert f"{whole}, integrity" in result.stdout
    assert "BROKEN" not in result.stdout


@pytest.mark.long
def test_doctor_shows_each_pair_and_what_its_link_falls_back_from(tmp_path: Path, config_only: Path) -> None:
    """NCCL does not start on a machine without a GPU."""
    options = [f"--model-path={config_only}", "--engine=null", "--prefill=2", "--transports=nccl,tcp"]
    with running_cluster(tmp_path, *options) as cluster:
        result = tandem("doctor", f"--redis-url={cluster.redis_url}")
    assert result.returncode == 0, result.stdout + result.stderr
    for prefill in ("prefill-0", "prefill-1"):
        assert re.search(rf"{prefill} -> decode-0  .* bytes over tcp .*; fell back from nccl: \S", result.stdout)
        assert re.search(rf"^ +{prefill} +[0-9.]+ GB/s, one machine", result.stdout, re.MULTILINE)
    assert re.search(r"^ +prefill -> decode +decode-0", result.stdout, re.MULTILINE)


def test_doctor_checks_only_what_it_is_given(shm_cluster: RunningCluster) -> None:
    result = tandem("doctor", f"--grpc-address={shm_cluster.grpc}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_doctor_names_a_frozen_worker(shm_cluster: RunningCluster) -> None:
    options = [f"--redis-url={shm_cluster.redis_url}", f"--gateway-url={shm_cluster.http}"]
    (pid,) = shm_cluster.pids("decode")
    os.kill(pid, signal.SIGSTOP)
    try:
        result = tandem("doctor", *options, "--timeout-s=2")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert result.returncode == 1
    assert "decode" in result.stderr
    eventually(lambda: tandem("doctor", *options).returncode == 0, BOUND_S, "the cluster is whole again")


@pytest.mark.long
def test_a_worker_of_another_kv_layout_ends_with_the_reason(shm_cluster: RunningCluster) -> None:
    """The cluster's KV is float32."""
    options = [f"--redis-url={shm_cluster.redis_url}", "--dtype=bfloat16", "--worker-id=stranger", "--grpc-port=0"]
    model = ["--model-path=models/demo/target", "--model-name=tandem-demo", "--num-blocks=64"]
    command = [sys.executable, "-m", "services.prefill", *model, *options]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert result.returncode == 1
    assert "stranger: layout_hash: " in result.stderr
    assert "that of decode-0 is" in result.stderr
    assert "Traceback" not in result.stderr
    assert shm_cluster.ready()


@pytest.mark.long
def test_a_worker_whose_id_is_taken_ends_with_the_reason(shm_cluster: RunningCluster) -> None:
    """Another cluster's, on the same Redis, in the same namespace; the one that has it serves on."""
    options = [f"--redis-url={shm_cluster.redis_url}", "--worker-id=decode-0", "--grpc-port=0", "--engine=null"]
    model = ["--model-path=models/demo/target", "--model-name=other", "--num-blocks=64"]
    (decode,) = shm_cluster.pids("decode")
    result = subprocess.run(
        [sys.executable, "-m", "services.decode", *model, *options], capture_output=True, encoding="utf-8", timeout=60
    )
    assert result.returncode == 1
    assert "decode-0: worker_id: decode-0 at 127.0.0.1:" in result.stderr
    assert "a live worker of that id is at 127.0.0.1:" in result.stderr
    assert "serves model tandem-demo. Give this worker" in result.stderr
    assert "Traceback" not in result.stderr
    assert shm_cluster.ready()
    assert shm_cluster.pids("decode") == [decode]


def test_doctor_without_a_cluster(here: Said) -> None:
    addresses = ["--redis-url=redis://127.0.0.1:1", "--gateway-url=http://127.0.0.1:1", "--grpc-address=127.0.0.1:1"]
    status, _, err = here("doctor", *addresses, "--timeout-s=1")
    assert status == 1
    assert "broken: redis, gateway, HTTP, gateway, gRPC" in err


@pytest.mark.long
def test_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--engine=null") as cluster:
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        assert len(family) >= 5
    eventually(lambda: not any(map(alive, family)), BOUND_S, "every process ends")
    assert cluster.process.returncode == 0


@pytest.mark.long
def test_killing_the_command_leaves_no_process_behind(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--engine=null") as cluster:
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        assert len(family) >= 5
        cluster.process.kill()
        cluster.process.wait(60)
        eventually(lambda: not any(map(alive, family)), BOUND_S, "every process ends")


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize("option", ["--http-port", "--grpc-port", "--redis-port"])
def test_a_port_in_use_is_named_and_nothing_is_started(option: str, tmp_path: Path) -> None:
    """Another cluster that answers there must not be taken for this one."""
    ports = dict(zip(("--http-port", "--grpc-port", "--redis-port"), free_ports(3), strict=True))
    with socket.create_server(("127.0.0.1", ports[option])):
        result = tandem("up", *(f"{name}={port}" for name, port in ports.items()), f"--logs={tmp_path / 'logs'}")
    assert result.returncode == 1
    assert f"{option}: cannot listen on 127.0.0.1:{ports[option]}: Address already in use" in result.stderr
    assert "ready" not in result.stdout
    assert not (tmp_path / "logs").exists()


def test_ports_of_several_gateways_that_meet_others_are_named(here: Said) -> None:
    status, _, err = here("up", "--gateways=2", "--http-port=18000", "--grpc-port=18001")
    assert status == 1
    assert "--own-http-port of gateway-0: 18001 is --grpc-port of gateway-0, too" in err


def test_keys_are_where_up_looks_for_them(tmp_path: Path) -> None:
    keys, asked = tmp_path / "keys.json", [sys.executable, "-m", "tandem", "keys"]
    environment = os.environ | {"TANDEM_API_KEYS": str(keys)}
    subprocess.run([*asked, "add", "--tenant=acme"], env=environment, check=True, timeout=60, capture_output=True)
    assert keys.exists()
    found = subprocess.run(
        [*asked, "usage", "--help"], capture_output=True, encoding="utf-8", timeout=60, check=True
    ).stdout
    assert f"(default: {UP_ADDRESSES['redis_url']})" in found


@pytest.mark.long
def test_a_worker_that_cannot_start_ends_the_command_at_once(tmp_path: Path) -> None:
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "redis"), free_ports(3), strict=True)]
    result = tandem("up", *ports, "--transports=pigeon", f"--logs={tmp_path}")
    assert result.returncode == 1
    assert "ended with status 1; its last words" in result.stderr
    assert "pigeon" in result.stderr
    assert "starting it again" not in result.stdout


def test_a_bad_value_is_found_before_anything_starts(here: Said) -> None:
    status, _, err = here("up", "--dtype=float17")
    assert status == 2
    assert "--dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16' (got 'float17')" in err


def test_up_refuses_a_folder_that_holds_no_model(here: Said, tmp_path: Path) -> None:
    status, _, err = here("up", f"--model-path={tmp_path}")
    assert status == 1
    assert "model-path" in err


def test_every_command_that_is_listed_is_there() -> None:
    listed = [line.split()[0] for line in USAGE.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert all(callable(resolve_name(f"tandem.commands.{name}")) for name in COMMANDS.values())


def test_unknown_command_shows_the_commands() -> None:
    result = tandem("fly")
    assert result.returncode == 2
    assert "doctor" in result.stderr


WITHOUT_RAY = """
import sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name="ray")

sys.meta_path.insert(0, NoRay())
from tandem.cli import main
main()
"""


@pytest.mark.parametrize("command", [("status",), ("down", "--ray"), ("up", "--ray", "auto")])
def test_where_ray_is_not_installed_its_commands_end_with_a_line(command: tuple[str, ...], tmp_path: Path) -> None:
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "redis"), free_ports(3), strict=True)]
    options = [*ports, f"--logs={tmp_path}"] if command[0] == "up" else []
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *command, *options], capture_output=True, encoding="utf-8", timeout=60
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "Ray is not installed here: pip install 'tandem[ray]'; `tandem ps` lists" in result.stderr


def test_version_is_the_packages() -> None:
    assert tandem("--version").stdout == f"tandem {__version__}\n"


@pytest.mark.parametrize("settings", [UpSettings, GenerateSettings, DoctorSettings])
def test_every_option_is_described(settings: type[Settings]) -> None:
    assert [name for name, field in settings.model_fields.items() if not field.description] == []
