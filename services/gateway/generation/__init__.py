"""One request, from its checked fields to the text of its answer.

Request -> Answer -> one Pipeline run for each choice -> Attempt on a pair of workers -> tokens -> Choice -> text
"""

from services.gateway.generation import tracing
from services.gateway.generation.answer import CLIENT_LEFT, REASONS, TOO_MANY, Answer
from services.gateway.generation.attempt import WORKER_LOST, ClusterAccess, Outcome
from services.gateway.generation.background import BackgroundTasks
from services.gateway.generation.choice import Delta
from services.gateway.generation.grammars import CheckedGrammars
from services.gateway.generation.migration import MigrationLimits
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.request import (
    Generation,
    check_length,
    check_prompt,
    check_salt,
    read_sampling,
    read_speculative,
    truncated,
)
from services.gateway.generation.structured import Structure, held_to, read_response_format, read_structure
from services.gateway.generation.suspicion import Deaths

__all__ = [
    "CLIENT_LEFT",
    "REASONS",
    "TOO_MANY",
    "WORKER_LOST",
    "Answer",
    "BackgroundTasks",
    "CheckedGrammars",
    "ClusterAccess",
    "Deaths",
    "Delta",
    "Generation",
    "MigrationLimits",
    "Outcome",
    "Pipeline",
    "Structure",
    "check_length",
    "check_prompt",
    "check_salt",
    "held_to",
    "read_response_format",
    "read_sampling",
    "read_speculative",
    "read_structure",
    "tracing",
    "truncated",
]
