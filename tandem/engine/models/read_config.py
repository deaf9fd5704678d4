"""Reading a model folder's config into a ModelConfig. Errors name the field that cannot be served."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoints import FAMILIES, ModelFile, end_tokens, read_file
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.config_file import ConfigFile
from tandem.engine.models.families import FAMILY_FILES
from tandem.engine.quantization import checkpoint_format


class _Family(ModelFile):
    model_type: str


def read_model_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Reads the config of the model at `path`; `max_model_len` shortens its context. Raises ValueError."""
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"model_path: {file} does not exist")
    family = read_file(_Family, file).model_type
    if family not in FAMILY_FILES:
        raise ValueError(f"{file}: model_type: {family!r} is not one of {', '.join(FAMILIES)}")
    raw = read_file(FAMILY_FILES[family], file)
    try:
        return _model_config(raw, frozenset(end_tokens(path)), max_model_len)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _model_config(raw: ConfigFile, eos_token_ids: frozenset[int], wanted: int | None) -> ModelConfig:
    longest = raw.longest
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len: {wanted} is more than the model's {longest}")
    length = wanted or longest
    rope, local_rope = raw.ropes(length)
    windows, turned = raw.windows(length), raw.rotary_dim
    return ModelConfig(
        model_type=raw.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.kv_heads,
        head_dim=raw.head_size,
        rms_norm_eps=raw.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=bool(raw.tie_word_embeddings),
        max_model_len=length,
        eos_token_ids=eos_token_ids,
        dtype=raw.dtype or raw.torch_dtype or "float32",
        norm_names=raw.norm_names,
        quantized=checkpoint_format(raw.quantization_config) if raw.quantization_config else None,
        windows=windows,
        local_rope=local_rope,
        rotary_dim=0 if turned == raw.head_size else turned,
        **({"activation": raw.activation} | raw.facts()),
    )
