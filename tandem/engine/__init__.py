"""The engine: token ids in, token ids out; knows no service and no proto. Rooms that run engines may enter.

Names that need torch are imported when first used: requests, sequences and the scheduler load without torch.
"""

from typing import TYPE_CHECKING

from tandem.engine.step_time import StepTime
from tandem.engine.types import (
    BlockRemoved,
    BlockStored,
    EngineConfig,
    EngineStats,
    FinishReason,
    KVSink,
    Progress,
    Request,
    SampledToken,
    SequenceOutput,
)
from tandem.lazy import lazily
from tandem.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.kv import KVLayout
    from tandem.engine.lora import AdapterStore, AdapterStoreFull
    from tandem.engine.models import ModelConfig
    from tandem.engine.parallel import RankDied
    from tandem.engine.scheduling import ExpectedBlocks, LentBlocks

__all__ = [
    "AdapterStore",
    "AdapterStoreFull",
    "BlockRemoved",
    "BlockStored",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ExpectedBlocks",
    "FinishReason",
    "KVLayout",
    "KVSink",
    "LentBlocks",
    "ModelConfig",
    "Progress",
    "RankDied",
    "Request",
    "SampledToken",
    "SamplingParams",
    "SequenceOutput",
    "StepTime",
]
_WITH_TORCH = {
    "engine": ("Engine",),
    "kv": ("KVLayout",),
    "lora": ("AdapterStore", "AdapterStoreFull"),
    "models": ("ModelConfig",),
    "parallel": ("RankDied",),
    "scheduling": ("LentBlocks", "ExpectedBlocks"),
}
__getattr__ = lazily(__name__, _WITH_TORCH)
