"""Products and attention in float32 on the CPU, in C. Models, forward passes and `tandem.precompile` may enter.

A row comes to the same numbers, bit for bit, whatever rows lie beside it.
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
