"""Models: a Hugging Face folder's config and the decoder it describes."""

from tandem.engine.models.config import ModelConfig, Rope, read_model_config
from tandem.engine.models.decoder import Attend, Decoder
from tandem.engine.models.ops import Ops, TorchOps

__all__ = ["Attend", "Decoder", "ModelConfig", "Ops", "Rope", "TorchOps", "read_model_config"]
