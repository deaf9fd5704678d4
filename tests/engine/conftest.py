"""Models and kernels, imported where a test asks for them: what schedules is tested without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tandem.machine import native

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tests.engine.tiny import Families


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Families:
    from tests.engine.tiny import make

    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def get(name: str) -> tuple[PreTrainedModel, Path]:
        if name not in made:
            model, path = make(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = model, path
        return made[name]

    return get


@pytest.fixture(scope="session")
def llama(family: Families) -> Path:
    return family("llama3")[1]


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without the kernels for float32."""
    from tandem.engine.float32 import float32_kernels

    monkeypatch.setattr(native, "compilers", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no kernels"))
    float32_kernels.cache_clear()
    assert float32_kernels() is None
    yield
    float32_kernels.cache_clear()


@pytest.fixture(scope="session", params=["any", "no AMX"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels, where this machine can have them; the test processes of a run compile them once."""
    from tandem.engine.kernels import load_library
    from tests.engine.tiny import can_amx, can_compile

    if not can_compile():
        pytest.skip("no CPU with AVX512-BF16, or no C compiler")
    library = load_library(tmp_path_factory.getbasetemp().parent / "kernels", amx=request.param == "any")
    assert library is not None
    assert bool(library.tandem_has_amx()) == (request.param == "any" and can_amx())
    return library
