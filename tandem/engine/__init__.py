"""The engine: token ids in, token ids out; knows no service and no proto. Others import from here only."""

from tandem.engine.engine import Engine
from tandem.engine.layout import KVLayout
from tandem.engine.lora import AdapterStore, AdapterStoreFull
from tandem.engine.models import ModelConfig
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
