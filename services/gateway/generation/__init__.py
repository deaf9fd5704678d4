"""From a checked request to the text of its answer. The gateway's doors, console and server may enter.

    Generation ──> Answer ──> Choice ──> Attempt ──> Mailbox of a worker's stream
    the request    of all     of n       on a pair   its tokens
                   choices    of each    of workers

Who owns what and who ends whom: docs/architecture.md, "From a request to its tokens".
"""

from services.gateway.generation import tracing
from services.gateway.generation.answer import CLIENT_LEFT, TOO_MANY, Answer
from services.gateway.generation.attempt import WORKER_LOST, ClusterAccess
from services.gateway.generation.background import BackgroundTasks
from services.gateway.generation.choice import REASONS, Choice
from services.gateway.generation.choice_text import Delta
from services.gateway.generation.grammars import CheckedGrammars
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.recovery.migration import MigrationLimits
from services.gateway.generation.recovery.suspicion import Deaths
from services.gateway.generation.request import (
    Generation,
    check_salt,
    read_sampling,
    read_speculative,
)
from services.gateway.generation.structured import Structure, held_to, read_response_format, read_structure

__all__ = [
    "CLIENT_LEFT",
    "REASONS",
    "TOO_MANY",
    "WORKER_LOST",
    "Answer",
    "BackgroundTasks",
    "CheckedGrammars",
    "Choice",
    "ClusterAccess",
    "Deaths",
    "Delta",
    "Generation",
    "MigrationLimits",
    "Pipeline",
    "Structure",
    "check_salt",
    "held_to",
    "read_response_format",
    "read_sampling",
    "read_speculative",
    "read_structure",
    "tracing",
]
