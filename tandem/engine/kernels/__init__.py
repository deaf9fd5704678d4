"""A decoder's forward pass and the sampler's choice in C, where the CPU can. The engine's build may enter.

It is compiled on first use.
"""

from tandem.engine.kernels.build import AMX, load_library
from tandem.engine.kernels.cpu import CpuForward
from tandem.engine.kernels.sampling import CpuChoose

__all__ = ["AMX", "CpuChoose", "CpuForward", "load_library"]
