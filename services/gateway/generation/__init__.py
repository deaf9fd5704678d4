"""From a checked request to the text of its answer. Entered by the gateway's doors, HTTP and gRPC, and by its server.

    Generation ──> Answer ──> Choice ──> Attempt ──> Mailbox of a worker's stream
    the request    of all     of n       on a pair   its tokens
                   choices    of each    of workers

    who          owns                                   made by     ended by
    Answer       its choices, root span, allowance      LLM         the end, a failed choice, or its reader, who closes
                                                                    `deltas`: client gone, deadline, stop
    Choice       its tokens so far, text, counts        Answer      Answer; a stop string; its pipeline
    Pipeline     (one for all) a choice's turn,         server      nobody: each of its runs ends with its choice
                 its attempts one after another
    Attempt      route, reservations, sequences on      Pipeline    the last token, a lost worker, or the pipeline;
                 workers, mailbox                                   `close`, in the background, frees what it owns
    Mailbox      tokens that were not taken yet         WorkerStream  the worker's end, a failure, the broken stream

Ends go down this table, and errors up: an attempt's WorkerLost makes the pipeline begin the next one (migration.py,
suspicion.py); any other ends the choice, the choice the answer, and the answer its other choices. Tokens go up: the
first and the last of an attempt by iteration, the others by one call from mailbox to written event (choice.py).
"""

from services.gateway.generation import tracing
from services.gateway.generation.answer import CLIENT_LEFT, TOO_MANY, Answer
from services.gateway.generation.attempt import WORKER_LOST, ClusterAccess
from services.gateway.generation.background import BackgroundTasks
from services.gateway.generation.choice import REASONS, Choice
from services.gateway.generation.choice_text import Delta
from services.gateway.generation.grammars import CheckedGrammars
from services.gateway.generation.migration import MigrationLimits
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.record import record_refused
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
    "Choice",
    "ClusterAccess",
    "Deaths",
    "Delta",
    "Generation",
    "MigrationLimits",
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
    "record_refused",
    "tracing",
    "truncated",
]
