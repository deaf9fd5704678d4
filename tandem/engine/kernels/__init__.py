"""A decoder's forward pass and the sampler's choice in C, compiled on first use, where the CPU has what it takes."""

from tandem.engine.kernels.build import load_library
from tandem.engine.kernels.cpu import CpuForward

__all__ = ["CpuForward", "load_library"]
