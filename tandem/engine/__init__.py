"""The engine: token ids in, token ids out; knows no service and no proto. Who runs engines may enter.

What needs torch is imported when it is asked for: a request, a sequence and the scheduler are there without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from tandem.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.kv import KVLayout
    from tandem.engine.lora import AdapterStore, AdapterStoreFull
    from tandem.engine.models import ModelConfig

__all__ = [
    "AdapterStore",
    "AdapterStoreFull",
    "BlockRemoved",
    "BlockStored",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "KVLayout",
    "KVSink",
    "ModelConfig",
    "Progress",
    "Request",
    "SampledToken",
    "SamplingParams",
    "SequenceOutput",
    "StepTime",
]
_WITH_TORCH = {"Engine": "engine", "KVLayout": "kv", "ModelConfig": "models"}
_WITH_TORCH |= dict.fromkeys(("AdapterStore", "AdapterStoreFull"), "lora")


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    return value
