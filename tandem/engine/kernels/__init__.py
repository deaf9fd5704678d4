"""A decoder's forward pass and the sampler's choice in C, on CPUs that can. The engine's build may enter.

The library is compiled on first use.
"""

from tandem.engine.kernels.build import AMX, load_library
from tandem.engine.kernels.cpu import CpuForward
from tandem.engine.kernels.sampling import CpuChoose

__all__ = ["AMX", "CpuChoose", "CpuForward", "load_library"]
