"""Weights in few bits: read from checkpoints, or made by the engine. Models, weights and kernels may enter."""

from tandem.engine.quantization.checkpoint_formats import CheckpointFormat, checkpoint_format
from tandem.engine.quantization.fp8 import Fp8Weight, as_fp8, rounded
from tandem.engine.quantization.quantization import QuantizedWeight, quantize

__all__ = [
    "CheckpointFormat",
    "Fp8Weight",
    "QuantizedWeight",
    "as_fp8",
    "checkpoint_format",
    "quantize",
    "rounded",
]
