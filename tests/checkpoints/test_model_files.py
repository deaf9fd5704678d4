"""Any bytes at all as the files of a model: it loads, or an error says why not. Nothing crashes, or fills memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.model.served import ServedModel
from tests.engine.tiny import make, make_engine
from tests.fuzzing import fuzzed
from tests.gateway.tiny_model import write_model

MAX_GROWTH = 512 * 2**20
VALUES = st.recursive(
    st.sampled_from([0, 1, -1, 3, 2**31, 2**63, 10**30, 1e300, "", "x", True, None, "default", "yarn", "linear"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that engine and gateway load."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    make("llama3").save_pretrained(folder)
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@st.composite
def damaged_json(draw: st.DrawFn, good: bytes) -> bytes:
    """With some fields that are others, or none at all."""
    said = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        place, key = said, draw(st.sampled_from(sorted(said)))
        while isinstance(place[key], dict) and place[key] and draw(st.booleans()):
            place, key = place[key], draw(st.sampled_from(sorted(place[key])))
        place[key] = draw(VALUES)
    return json.dumps(draw(VALUES) if draw(st.integers(0, 9)) == 0 else said).encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes, within: int) -> bytes:
    """With some bytes that are others, or cut off."""
    data = bytearray(good)
    for at, byte in draw(
        st.lists(st.tuples(st.integers(0, min(within, len(good)) - 1), st.integers(0, 255)), max_size=6)
    ):
        data[at] = byte
    return bytes(data[: draw(st.sampled_from([len(good), len(good) // 2, 9, 8, 0]) | st.integers(0, len(good)))])


def engine(folder: Path) -> None:
    make_engine(folder)


def gateway(folder: Path) -> None:
    model = ServedModel.load(folder, "m", 0)
    if model.chat_template is not None:
        model.chat_template.render([{"role": "user", "content": "x"}])


FILES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "config.json": (engine, gateway),
    "generation_config.json": (engine, gateway),
    "model.safetensors.index.json": (engine,),
    "model.safetensors": (engine,),
    "tokenizer.json": (gateway,),
    "tokenizer_config.json": (gateway,),
    "chat_template.jinja": (gateway,),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_any_bytes_as_a_models_file(folder: Path, tmp_path: Path, name: str) -> None:
    good = (folder / name).read_bytes()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if name == "chat_template.jinja":
        (tmp_path / "tokenizer_config.json").unlink()
    elif name == "tokenizer_config.json":
        (tmp_path / "chat_template.jinja").unlink()
        good = json.dumps(
            {**json.loads(good), "chat_template": [{"name": "default", "template": "{{ messages }}"}]}
        ).encode()
    ends = set[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @fuzzed(25)
    @given(damaged_bytes(good, 2000) | damaged_json(good) if name.endswith(".json") else damaged_bytes(good, 2000))
    def load(data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        for reader in FILES[name]:
            try:
                reader(tmp_path)
                ends.add("loaded")
            except (OSError, ValueError) as error:
                ends.add("refused" if str(error) else "refused without a word")

    load()
    assert ends == {"loaded", "refused"}
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MAX_GROWTH
