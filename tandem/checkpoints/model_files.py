"""Typed reading of a Hugging Face folder's JSON files: an error names the file and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tandem.sampling import OF_MODEL, TYPES

MAX_BYTES = 64 * 2**20
# The supported values of model_type in config.json.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite", "smollm3", "glm", "glm4", "gemma2", "gemma3_text",
    "cohere", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ModelFile(BaseModel):
    """A JSON file. Fields that are not declared may have any value."""

    # Built at first use, as a process reads only one or two of the many kinds.
    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


class EndsFile(ModelFile):
    eos_token_id: TokenId | list[TokenId] | None = None


class ContextFile(EndsFile):
    """The part of config.json that processes without weights need."""

    max_position_embeddings: int = Field(ge=1, lt=2**31)


class CallsFile(ModelFile):
    """The part of tokenizer_config.json that names a model's format of tool calls, if its template does not show it."""

    tool_parser: str | None = None


_defaults: dict[str, Any] = {name: (TYPES[name] | None, None) for name in OF_MODEL}
_defaults["max_new_tokens"] = (Annotated[int, Field(ge=1, lt=2**31)] | None, None)
# The file includes the sampling parameters of requests that set none.
GenerationFile = create_model("GenerationFile", __base__=EndsFile, **_defaults)
F = TypeVar("F", bound=ModelFile)


def read_file(kind: type[F], file: Path) -> F:
    """Reads a file of this kind.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is malformed; the error names the file and the field.
    """
    return parsed(kind, read_bytes(file), file)


def read_bytes(file: Path) -> bytes:
    """Reads a file of bounded size.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is too long.
    """
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{file}: at most {MAX_BYTES} bytes, got {size}")
    return file.read_bytes()


def parsed(kind: type[F], data: bytes, file: Path) -> F:
    """Parses the content of a file.

    Raises:
        ValueError: the content is malformed.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            raise ValueError(f"{file}: {field} is missing") from None
        said = problem["msg"][0].lower() + problem["msg"][1:]
        raise ValueError(f"{file}: {field}: {said}" if field else f"{file}: {said}") from None
