"""A tokenizer that is loaded in parts is the same tokenizer; what cannot be taken apart is loaded at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from services.gateway import Gateway, GatewaySettings
from services.gateway.text import Tokenizer
from services.gateway.untrusted import SMALL_BYTES, parts_of
from tandem.registry import Registry
from tests.gateway.conftest import TEXT, eventually
from tests.gateway.peers import CONTEXT, MODEL, folder_of, peers_on
from tests.gateway.tiny_model import byte_level_tokenizer, large_tokenizer

WORDS = 20_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    large_tokenizer(WORDS).save(str(folder / "tokenizer.json"))
    assert (folder / "tokenizer.json").stat().st_size > SMALL_BYTES
    return folder


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> str:
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(said)
    (to / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    return str(to / "tokenizer.json")


async def test_it_makes_the_same_tokens_and_texts(large: Path) -> None:
    parts = parts_of(str(large / "tokenizer.json"))
    assert parts is not None
    assert len(parts.vocabulary) > 5
    whole, assembled = Tokenizer.load(large), Tokenizer.load(large, parts=parts)
    assert assembled._tokenizer.to_str() == whole._tokenizer.to_str()
    assert (assembled.vocab_size, assembled.longest_token) == (whole.vocab_size, whole.longest_token)
    random = Random(1)
    words = [whole.decode([i]) for i in range(whole.vocab_size)]
    for _ in range(200):
        text = TEXT + "".join(random.choices(words, k=30)) + "<|end|>"
        ids = await whole.encode(text, True)
        assert await assembled.encode(text, True) == ids
        assert assembled.decode(ids) == whole.decode(ids)


def test_merges_as_older_files_write_them_and_options_are_kept(large: Path, tmp_path: Path) -> None:
    def change(said: dict[str, Any]) -> None:
        model = said["model"]
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
        model |= {"ignore_merges": True, "unk_token": "<|end|>", "fuse_unk": True, "byte_fallback": True}

    path = rewritten(large, tmp_path, change)
    parts = parts_of(path)
    assert parts is not None
    assert parts.assemble().to_str() == Library.from_file(path).to_str()


def test_an_added_token_whose_id_is_beyond_the_vocabulary_stays(large: Path, tmp_path: Path) -> None:
    def change(said: dict[str, Any]) -> None:
        added = {**said["added_tokens"][0], "content": "<|more|>", "id": WORDS + 1}
        said["added_tokens"].append(added)

    path = rewritten(large, tmp_path, change)
    parts = parts_of(path)
    assert parts is not None
    assert parts.assemble().token_to_id("<|more|>") == Library.from_file(path).token_to_id("<|more|>")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"model": {"type": "BPE", "vocab": [], "merges": 3}}']
)
def test_what_is_malformed_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: Cannot instantiate"):
        parts_of(str(tmp_path / "tokenizer.json"))


async def test_unigram_is_taken_apart_too(tmp_path: Path) -> None:
    """Tokens that are added may be words of it, or not."""
    random = Random(3)
    words = {"<unk>": 0.0, "<s>": -1.0} | {f"▁{random.randrange(10**9)}": -random.random() for _ in range(20_000)}
    library = Library(models.Unigram(list(words.items()), unk_id=0, byte_fallback=False))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>", lstrip=True), AddedToken("<more>")])
    library.add_tokens(["new word"])
    library.save(str(tmp_path / "tokenizer.json"))
    parts = parts_of(str(tmp_path / "tokenizer.json"))
    assert parts is not None
    assert parts.assemble().to_str() == Library.from_file(str(tmp_path / "tokenizer.json")).to_str()
    whole, assembled = Tokenizer.load(tmp_path), Tokenizer.load(tmp_path, parts=parts)
    assert (assembled.vocab_size, assembled.longest_token) == (whole.vocab_size, whole.longest_token)
    text = "<s>" + " ".join(word[1:] for word in random.choices(list(words), k=50)) + "<more> new word"
    assert await assembled.encode(text, True) == await whole.encode(text, True)


def test_another_kind_is_not_taken_apart_and_may_not_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.json"
    Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    assert parts_of(str(file)) is None
    monkeypatch.setattr("services.gateway.untrusted.tokenizer_parts.MOST_WHOLE", file.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json: a tokenizer of this kind"):
        parts_of(str(file))


def test_a_token_that_two_ids_claim_is_not_taken_apart_into_something_else(large: Path, tmp_path: Path) -> None:
    """Whatever the file says: parts make what the whole makes, or there are none."""
    random = Random(2)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()

        def change(said: dict[str, Any]) -> None:
            words = said["model"]["vocab"]
            for word in random.sample(list(words), 3):
                words[word] = random.randrange(2 * WORDS)
            random.shuffle(said["model"]["merges"])

        path = rewritten(large, folder, change)
        parts = parts_of(path)
        if parts is not None:
            assert parts.assemble().to_str() == Library.from_file(path).to_str()


async def test_a_gateway_that_serves_loads_the_next_model_by_parts(
    gateway: Gateway, http: httpx.AsyncClient, settings: GatewaySettings, tmp_path: Path, large: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loads: list[bool] = []
    load = Tokenizer.load

    def noted(folder: Path, most: int = 0, parts: Any = None) -> Tokenizer:
        loads.append(parts is not None)
        return load(folder, most, parts)

    monkeypatch.setattr(Tokenizer, "load", noted)
    folder = tmp_path / "next"
    folder.mkdir()
    for file in folder_of(CONTEXT).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer.json").write_bytes((large / "tokenizer.json").read_bytes())
    words = list(await Tokenizer(byte_level_tokenizer()).encode("once", add_special_tokens=False))
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    async with peers_on(registry, lambda spec: words) as peers:
        peers.model, peers.folder = "next", folder
        await peers.add_decode("next-d")
        await eventually(lambda: "next" in gateway.directory.names)
        assert loads == [True]
        found = await http.post("/tokenize", json={"model": "next", "prompt": TEXT})
        expected = await load(large).encode(TEXT, add_special_tokens=True)
        assert found.json()["tokens"] == list(expected)
        assert (await http.post("/tokenize", json={"model": MODEL, "prompt": TEXT})).status_code == 200
