"""The decoder's forward pass in C, for the CPUs that have the instructions, compiled on first use."""

from tandem.engine.kernels.build import load_library
from tandem.engine.kernels.cpu import CpuForward

__all__ = ["CpuForward", "load_library"]
