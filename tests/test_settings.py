from __future__ import annotations

import pytest
from pydantic import Field

from tandem.settings import Settings, load


class Demo(Settings):
    grpc_port: int = Field(1, ge=0)
    name: str = "x"


def test_defaults_then_environment_then_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Demo, []).grpc_port == 1
    monkeypatch.setenv("TANDEM_GRPC_PORT", "2")
    assert load(Demo, []).grpc_port == 2
    assert load(Demo, ["--grpc-port=3"]).grpc_port == 3


@pytest.mark.parametrize("argument", ["--grpc-port=many", "--grpc-port=-1", "--nonsense=1"])
def test_a_bad_value_names_the_field(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Demo, [argument])
    assert ended.value.code == 2
    assert argument.partition("=")[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
