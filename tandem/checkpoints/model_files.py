"""The JSON files of a Hugging Face folder, read by what each field must be: an error names the file and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tandem.sampling import OF_MODEL, TYPES

MAX_BYTES = 64 * 2**20
# What config.json may say as model_type.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite", "smollm3", "glm", "glm4", "gemma2", "gemma3_text",
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ModelFile(BaseModel):
    """Fields that nobody here reads may be anything."""

    # Of the many kinds a process reads one or two: each is built when it is.
    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


class EndsFile(ModelFile):
    eos_token_id: TokenId | list[TokenId] | None = None


class ContextFile(EndsFile):
    """The part of config.json that those need who have no weights."""

    max_position_embeddings: int = Field(ge=1, lt=2**31)


class CallsFile(ModelFile):
    """The part of tokenizer_config.json that says how a model writes calls of tools, where its template does not."""

    tool_parser: str | None = None


_defaults: dict[str, Any] = {name: (TYPES[name] | None, None) for name in OF_MODEL}
_defaults["max_new_tokens"] = (Annotated[int, Field(ge=1, lt=2**31)] | None, None)
# With the sampling parameters that a request which says nothing gets.
GenerationFile = create_model("GenerationFile", __base__=EndsFile, **_defaults)
F = TypeVar("F", bound=ModelFile)


def read_file(kind: type[F], file: Path) -> F:
    """
    Raises:
        OSError: it is not there.
        ValueError: it is not what it should be; names the file, and the field.
    """
    return parsed(kind, read_bytes(file), file)


def read_bytes(file: Path) -> bytes:
    """
    Raises:
        OSError: it is not there.
        ValueError: it is too long to be read whole.
    """
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{file}: at most {MAX_BYTES} bytes, got {size}")
    return file.read_bytes()


def parsed(kind: type[F], data: bytes, file: Path) -> F:
    """
    Raises:
        ValueError
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
