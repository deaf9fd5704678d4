"""Models: a Hugging Face folder's config and the decoder it describes."""

from tandem.engine.models.config import ModelConfig, Rope, read_model_config
from tandem.engine.models.decoder import Attend, Decoder, DecoderLayer, Linear

__all__ = ["Attend", "Decoder", "DecoderLayer", "Linear", "ModelConfig", "Rope", "read_model_config"]
