"""Models: a Hugging Face folder's config and the decoder it describes. The engine and benchmarks may enter."""

from tandem.engine.models.config import ModelConfig, Rope, read_model_config
from tandem.engine.models.decoder import (
    MLP,
    ROWS_ALIKE,
    Attend,
    Attention,
    Decoder,
    DecoderLayer,
    Linear,
    is_exact,
    linear,
    rms_norm,
    unadapted,
)
from tandem.engine.models.rope import cos_sin, inverse_frequencies

__all__ = [
    "MLP",
    "ROWS_ALIKE",
    "Attend",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "Linear",
    "ModelConfig",
    "Rope",
    "cos_sin",
    "inverse_frequencies",
    "is_exact",
    "linear",
    "read_model_config",
    "rms_norm",
    "unadapted",
]
