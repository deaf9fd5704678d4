"""A decoder's forward pass and the sampler's choice in C, on CPUs that can. The engine's build may enter.

The library is compiled on first use.
"""

from tandem.engine.kernels.build import AMX, load_library
from tandem.engine.kernels.cpu import CpuForward, private_room
from tandem.engine.kernels.layers import PANEL_OUTPUTS, TILE_ROWS
from tandem.engine.kernels.sampling import CpuChoose
from tandem.engine.kernels.structs import Columns, RanksStruct

__all__ = [
    "AMX",
    "PANEL_OUTPUTS",
    "TILE_ROWS",
    "Columns",
    "CpuChoose",
    "CpuForward",
    "RanksStruct",
    "load_library",
    "private_room",
]
