"""The decoder's arithmetic in C, for the CPUs that have the instructions, compiled on first use."""

from tandem.engine.kernels.build import load_library
from tandem.engine.kernels.cpu import CpuKernels

__all__ = ["CpuKernels", "load_library"]
