"""A gateway gets a model's files from a worker: whole, the right ones, and no more than it wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import Unavailable
from services.gateway.model.fetch import ModelFolders, gathered
from services.gateway.model.served import ServedModel
from tandem import rpc
from tandem.checkpoints import TEXT_FILES, TextFiles, text_file
from tandem.checkpoints.gguf import as_folder
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.vocabulary import load_tokenizer
from tandem.worker.serving.model_files import PART, ModelFilesService
from tests.engine.gguf_files import TEMPLATE as GGUF_TEMPLATE
from tests.engine.gguf_files import make_file
from tests.fuzzing import fuzzed
from tests.gateway.tiny_model import write_model

Parts = Callable[[], Iterator[worker_pb2.ReadModelFilesResponse]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_model(tmp_path / "model")


@pytest.fixture
def folders(tmp_path: Path) -> ModelFolders:
    return ModelFolders(rpc.channel, TextFiles(tmp_path / "cache"))


@asynccontextmanager
async def serving(servicer: Any) -> AsyncIterator[str]:
    """Yields its address."""
    made = rpc.Servicer(
        "tandem.v1.ModelFilesService", servicer, worker_pb2_grpc.add_ModelFilesServiceServicer_to_server
    )
    server = await rpc.serve([made], "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("size", [PART - 1, PART, 3 * PART + 5])
async def test_a_gateway_has_what_its_worker_has(folder: Path, folders: ModelFolders, size: int) -> None:
    (folder / "generation_config.json").write_bytes(b"{}".ljust(size))
    service = ModelFilesService(folder)
    async with serving(service) as address:
        found = await folders.folder(service.fingerprint, [address])
        assert {n: text_file(found, n) for n in TEXT_FILES} == {n: text_file(folder, n) for n in TEXT_FILES}
    assert await folders.folder(service.fingerprint, []) == found  # it needs no worker any more
    ours, theirs = ServedModel.load(found, "tiny", 0), ServedModel.load(folder, "tiny", 0)
    assert await ours.tokenizer.encode("once upon", True) == await theirs.tokenizer.encode("once upon", True)
    assert (ours.max_model_len, ours.defaults) == (theirs.max_model_len, theirs.defaults)


async def test_of_a_gguf_file_a_gateway_gets_the_words_that_are_in_it(folders: ModelFolders, tmp_path: Path) -> None:
    """None of its weights, and the template and defaults that its metadata say."""
    says = {"general.sampling.temp": 0.25, "tokenizer.chat_template": GGUF_TEMPLATE}
    make_file(tmp_path / "m.gguf", "qwen2", "Q8_0", says)
    folder = as_folder(tmp_path / "m.gguf")
    service = ModelFilesService(folder)
    async with serving(service) as address:
        found = await folders.folder(service.fingerprint, [address])
    assert {file.name for file in found.iterdir()} <= set(TEXT_FILES)
    served = ServedModel.load(found, "m", 0)
    ids = await served.tokenizer.encode("hello hell", False)
    assert [served.tokenizer.token_bytes(i) for i in ids] == [b"hello", b" ", b"hell"]
    assert list(ids) == load_tokenizer(folder).encode("hello hell", add_special_tokens=False).ids
    assert (served.eos_token_ids, served.max_model_len, served.defaults["temperature"]) == ((1,), 128, 0.25)
    assert served.chat_template is not None
    assert served.chat_template.render([{"role": "user", "content": "hello"}]) == "user: hello\n"


async def test_a_worker_of_another_model_is_passed_by(folder: Path, folders: ModelFolders, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    right, wrong = ModelFilesService(folder), ModelFilesService(write_model(tmp_path / "other", context=64))
    async with serving(wrong) as there, serving(right) as here:
        with pytest.raises(Unavailable, match=f"this worker's is {wrong.fingerprint}"):
            await folders.folder(right.fingerprint, [there])
        assert (await folders.folder(right.fingerprint, [there, here])).name == right.fingerprint


async def test_files_that_have_changed_since_are_not_taken(folder: Path, folders: ModelFolders) -> None:
    service = ModelFilesService(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8}), encoding="utf-8")
    async with serving(service) as address:
        with pytest.raises(Unavailable, match="not those of fingerprint"):
            await folders.folder(service.fingerprint, [address])


async def test_a_model_without_a_tokenizer_is_given_to_nobody(folder: Path, folders: ModelFolders) -> None:
    (folder / "tokenizer.json").unlink()
    async with serving(ModelFilesService(folder)) as address:
        with pytest.raises(Unavailable, match="this worker's is none"):
            await folders.folder("", [address])


class Liar(worker_pb2_grpc.ModelFilesServiceServicer):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def ReadModelFiles(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.ReadModelFilesResponse]:
        for part in self._parts():
            yield part


def endless() -> Iterator[worker_pb2.ReadModelFilesResponse]:
    yield worker_pb2.ReadModelFilesResponse(name="tokenizer.json")
    while True:
        yield worker_pb2.ReadModelFilesResponse(data=bytes(PART))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (endless, "more than"),
        (lambda: iter([worker_pb2.ReadModelFilesResponse(name="../../x", data=b"1")]), "is not one of"),
        (lambda: iter([worker_pb2.ReadModelFilesResponse(name="config.json")] * 2), "came twice"),
        (lambda: iter([worker_pb2.ReadModelFilesResponse(data=b"1")]), "is missing in the first part"),
    ],
    ids=["endless", "foreign", "twice", "nameless"],
)
async def test_a_worker_that_sends_what_it_should_not_is_left(folders: ModelFolders, parts: Parts, why: str) -> None:
    async with serving(Liar(parts)) as address:
        with pytest.raises(Unavailable, match=why):
            await folders.folder("f" * 32, [address])


@fuzzed(60)
@given(st.lists(st.tuples(st.sampled_from(["", *TEXT_FILES]) | st.text(max_size=9), st.binary(max_size=9))))
async def test_any_parts_are_files_or_a_refusal(parts: list[tuple[str, bytes]]) -> None:
    async def stream() -> AsyncIterator[worker_pb2.ReadModelFilesResponse]:
        for name, data in parts:
            yield worker_pb2.ReadModelFilesResponse(name=name, data=data)

    try:
        files = await gathered(stream())
    except ValueError:
        return
    assert b"".join(files.values()) == b"".join(data for _, data in parts)
    assert set(files) <= set(TEXT_FILES)
