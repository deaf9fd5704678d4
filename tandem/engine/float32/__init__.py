"""Products and attention in float32 on the CPU, in C. Models, forward passes and `tandem.precompile` may enter.

A row's results are the same, bit for bit, whatever other rows a step has.
"""

from tandem.engine.float32.kernels import (
    INSTRUCTIONS,
    MAX_HEAD_DIM,
    WIDER,
    Float32Kernels,
    StepRows,
    float32_kernels,
    library_path,
)

__all__ = [
    "INSTRUCTIONS",
    "MAX_HEAD_DIM",
    "WIDER",
    "Float32Kernels",
    "StepRows",
    "float32_kernels",
    "library_path",
]
