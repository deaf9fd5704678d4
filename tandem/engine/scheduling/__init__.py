"""Chooses the next step's sequences and their blocks: queues, turns, the block pool. The engine may enter; no torch."""

from tandem.engine.scheduling.answer_lengths import AnswerLengths
from tandem.engine.scheduling.block_pool import BlockPool
from tandem.engine.scheduling.pace import Pace
from tandem.engine.scheduling.scheduler import Scheduled, Scheduler
from tandem.engine.scheduling.sequence import DRAW, Ahead, Row, Sequence, Status, new_sequence
from tandem.engine.scheduling.sequence_blocks import SequenceBlocks

__all__ = [
    "DRAW",
    "Ahead",
    "AnswerLengths",
    "BlockPool",
    "Pace",
    "Row",
    "Scheduled",
    "Scheduler",
    "Sequence",
    "SequenceBlocks",
    "Status",
    "new_sequence",
]
