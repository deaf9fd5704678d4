from __future__ import annotations

import pytest
from pydantic import Field

from tandem.settings import Settings, load
from tandem.worker import WorkerSettings

pytestmark = pytest.mark.fast


class Demo(Settings):
    grpc_port: int = Field(1, ge=0, description="port")
    name: str = Field("", description="who it is; if not given, nobody")


def test_defaults_then_environment_then_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Demo, []).grpc_port == 1
    monkeypatch.setenv("TANDEM_GRPC_PORT", "2")
    assert load(Demo, []).grpc_port == 2
    assert load(Demo, ["--grpc-port=3"]).grpc_port == 3


@pytest.mark.parametrize("argument", ["--grpc-port=many", "--grpc-port=-1", "--nonsense=1"])
def test_a_bad_option_is_named(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Demo, [argument])
    assert ended.value.code == 2
    assert argument.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [('{"spedup": 2}', "--null-step.spedup: "), ('{"speedup": -1}', "--null-step: Value error, speedup: -1")],
)
def test_a_bad_part_of_a_map_is_named(given: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(WorkerSettings, ["--model-path=.", f"--null-step={given}"])
    assert capsys.readouterr().err.startswith(named)


def test_a_bad_variable_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_GRPC_PORT", "many")
    with pytest.raises(SystemExit):
        load(Demo, [])
    assert capsys.readouterr().err.startswith("TANDEM_GRPC_PORT: Input should be a valid integer")


def test_help_names_each_default_once_and_only_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Demo, ["--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "--grpc-port int port (default: 1)" in help_text
    assert "--name str who it is; if not given, nobody" in help_text
    assert help_text.count("default: ") == 1
