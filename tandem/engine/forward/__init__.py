"""The forward pass: in torch, with FlashInfer, as CUDA graphs. Runners, kernels and speculation may enter."""

from tandem.engine.forward.attention import PagedAttention, Shape
from tandem.engine.forward.decode_graphs import CudaCapture, DecodeGraphs, padded
from tandem.engine.forward.flashinfer import paged_attention_for
from tandem.engine.forward.forward import Chunk, Forward, Near, Observer, StepInput, Taps, TorchForward, step_input

__all__ = [
    "Chunk",
    "CudaCapture",
    "DecodeGraphs",
    "Forward",
    "Near",
    "Observer",
    "PagedAttention",
    "Shape",
    "StepInput",
    "Taps",
    "TorchForward",
    "padded",
    "paged_attention_for",
    "step_input",
]
