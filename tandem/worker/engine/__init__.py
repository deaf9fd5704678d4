"""The engine's interface for coroutines, on a thread or on the loop, and its measured speed. Workers may enter."""

from tandem.worker.engine.beside import at_once, block_chain, give_up, land, release
from tandem.worker.engine.inline import InlineEngine
from tandem.worker.engine.port import Added, Ended, EngineDied, EnginePort, EngineStuck, Event
from tandem.worker.engine.rates import Line
from tandem.worker.engine.step_counts import StepCounts
from tandem.worker.engine.thread import EngineThread

__all__ = [
    "Added",
    "Ended",
    "EngineDied",
    "EnginePort",
    "EngineStuck",
    "EngineThread",
    "Event",
    "InlineEngine",
    "Line",
    "StepCounts",
    "at_once",
    "block_chain",
    "give_up",
    "land",
    "release",
]
