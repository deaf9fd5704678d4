from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.engine.tiny import Families, make


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
