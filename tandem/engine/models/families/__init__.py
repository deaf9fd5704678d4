"""The families: each one's own fields of config.json and their meaning for a decoder. read_config.py may enter.

A family is a class here and its `model_type` in FAMILIES of tandem/checkpoints/model_files.py.
"""

from collections.abc import Mapping

from tandem.engine.models.config_file import ConfigFile
from tandem.engine.models.families.dense import (
    CohereFile,
    Gemma2File,
    Gemma3File,
    Glm4File,
    GlmFile,
    GraniteFile,
    LlamaFile,
    MistralFile,
    Olmo2File,
    Phi3File,
    Qwen2File,
    Qwen3File,
    SmolLM3File,
)
from tandem.engine.models.families.experts import (
    DeepseekV2File,
    DeepseekV3File,
    GptOssFile,
    MixtralFile,
    Qwen2MoeFile,
    Qwen3MoeFile,
)

FAMILY_FILES: Mapping[str, type[ConfigFile]] = {
    "llama": LlamaFile, "mistral": MistralFile, "qwen2": Qwen2File, "qwen3": Qwen3File, "phi3": Phi3File,
    "olmo2": Olmo2File, "granite": GraniteFile, "smollm3": SmolLM3File, "glm": GlmFile, "glm4": Glm4File,
    "gemma2": Gemma2File, "gemma3_text": Gemma3File, "cohere": CohereFile,
    "mixtral": MixtralFile, "qwen2_moe": Qwen2MoeFile, "qwen3_moe": Qwen3MoeFile, "gpt_oss": GptOssFile,
    "deepseek_v2": DeepseekV2File, "deepseek_v3": DeepseekV3File,
}  # fmt: skip

__all__ = ["FAMILY_FILES"]
