"""Models: a Hugging Face folder's config and the decoder it describes. The engine and benchmarks may enter."""

from tandem.engine.models.attention import Attend, Attention, Scope
from tandem.engine.models.config import ExpertsConfig, ModelConfig, Rope
from tandem.engine.models.decoder import Decoder, DecoderLayer
from tandem.engine.models.experts import Experts
from tandem.engine.models.latent import LatentAttention
from tandem.engine.models.linear import ROWS_ALIKE, Adapt, Linear, dense, is_exact, linear, rms_norm, unadapted
from tandem.engine.models.mlp import MLP
from tandem.engine.models.read_config import read_model_config
from tandem.engine.models.rope import cos_sin, inverse_frequencies

__all__ = [
    "MLP",
    "ROWS_ALIKE",
    "Adapt",
    "Attend",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "Experts",
    "ExpertsConfig",
    "LatentAttention",
    "Linear",
    "ModelConfig",
    "Rope",
    "Scope",
    "cos_sin",
    "dense",
    "inverse_frequencies",
    "is_exact",
    "linear",
    "read_model_config",
    "rms_norm",
    "unadapted",
]
