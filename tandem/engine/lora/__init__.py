"""LoRA adapters: low-rank products added to linear layers, of each row's own adapter. The engine may enter.

PEFT folder ──read_adapter: checked, scaled──> Adapter ──AdapterStore: RAM, the latest used──> Request.adapter
a step's rows ──grouped by adapter──> RowAdapters: one small product each, in torch     (kernels/lora.h: in C)
"""

from tandem.engine.lora.adapter import PARTS, Adapter, LowRank, RowAdapters, runs
from tandem.engine.lora.peft import Base, checkpoint_shapes, part_sizes, read_adapter, shapes_of
from tandem.engine.lora.store import AdapterStore, AdapterStoreFull

__all__ = [
    "PARTS",
    "Adapter",
    "AdapterStore",
    "AdapterStoreFull",
    "Base",
    "LowRank",
    "RowAdapters",
    "checkpoint_shapes",
    "part_sizes",
    "read_adapter",
    "runs",
    "shapes_of",
]
