from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tandem.engine.kernels import load_library
from tests.engine.tiny import Families, can_amx, can_compile, make


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Families:
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


@pytest.fixture(scope="session", params=["any", "no AMX"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels, where this machine can have them."""
    if not can_compile():
        pytest.skip("no CPU with AVX512-BF16, or no C compiler")
    library = load_library(tmp_path_factory.mktemp("kernels"), amx=request.param == "any")
    assert library is not None
    assert bool(library.tandem_has_amx()) == (request.param == "any" and can_amx())
    return library
