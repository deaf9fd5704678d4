"""Chooses the next step's sequences and their blocks: queues, turns, the block pool. The engine may enter; no torch."""

from tandem.engine.scheduling.answer_lengths import AnswerLengths
from tandem.engine.scheduling.block_pool import BlockPool
from tandem.engine.scheduling.moving_blocks import ExpectedBlocks, LentBlocks
from tandem.engine.scheduling.pace import Pace
from tandem.engine.scheduling.scheduler import Scheduled, Scheduler
from tandem.engine.scheduling.sequence import DRAW, Ahead, Row, Sequence, Status, new_sequence
from tandem.engine.scheduling.sequence_blocks import SequenceBlocks
from tandem.engine.scheduling.window_blocks import WindowBlocks
from tandem.engine.scheduling.windows import Windows

__all__ = [
    "DRAW",
    "Ahead",
    "AnswerLengths",
    "BlockPool",
    "ExpectedBlocks",
    "LentBlocks",
    "Pace",
    "Row",
    "Scheduled",
    "Scheduler",
    "Sequence",
    "SequenceBlocks",
    "Status",
    "WindowBlocks",
    "Windows",
    "new_sequence",
]
