"""Models as files: find by name, fetch, check, measure, open from GGUF. Anyone may enter; without torch."""

from tandem.checkpoints.gguf import TENSORS_FILE, WEIGHTS_FILE, as_folder
from tandem.checkpoints.hub import (
    HUB,
    WHEELS,
    Found,
    fetch_adapter,
    fetch_files,
    find_model,
    is_hub_name,
    is_name,
    wanted_files,
    weights_bytes,
)
from tandem.checkpoints.memory_fit import MemoryNeed, described, held_weights, misfit
from tandem.checkpoints.model_files import (
    FAMILIES,
    GENERATION_FILE,
    ContextFile,
    GenerationFile,
    ModelFile,
    read_bytes,
    read_file,
)
from tandem.checkpoints.model_path import ModelPath
from tandem.checkpoints.pooling import PoolingRule, read_pooling
from tandem.checkpoints.special_tokens import end_tokens, read_tokenizer_config, special_tokens
from tandem.checkpoints.text_files import (
    MAX_TEXT_BYTES,
    TEXT_FILES,
    TOOL_TEMPLATE,
    TextFiles,
    is_fingerprint,
    text_file,
    text_fingerprint,
)

__all__ = [
    "FAMILIES",
    "GENERATION_FILE",
    "HUB",
    "MAX_TEXT_BYTES",
    "TENSORS_FILE",
    "TEXT_FILES",
    "TOOL_TEMPLATE",
    "WEIGHTS_FILE",
    "WHEELS",
    "ContextFile",
    "Found",
    "GenerationFile",
    "MemoryNeed",
    "ModelFile",
    "ModelPath",
    "PoolingRule",
    "TextFiles",
    "as_folder",
    "described",
    "end_tokens",
    "fetch_adapter",
    "fetch_files",
    "find_model",
    "held_weights",
    "is_fingerprint",
    "is_hub_name",
    "is_name",
    "misfit",
    "read_bytes",
    "read_file",
    "read_pooling",
    "read_tokenizer_config",
    "special_tokens",
    "text_file",
    "text_fingerprint",
    "wanted_files",
    "weights_bytes",
]
