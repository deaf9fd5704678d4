"""One forward pass: in torch, with FlashInfer, as CUDA graphs. For runners, kernels and speculation."""

from tandem.engine.forward.decode_graphs import DecodeGraphs, cuda_capture, padded
from tandem.engine.forward.flashinfer import paged_attention_for
from tandem.engine.forward.forward import Chunk, Forward, Observer, StepInput, Taps, TorchForward, step_input

__all__ = [
    "Chunk",
    "DecodeGraphs",
    "Forward",
    "Observer",
    "StepInput",
    "Taps",
    "TorchForward",
    "cuda_capture",
    "padded",
    "paged_attention_for",
    "step_input",
]
