"""A worker's services for gateways: streams, suspects, adapters, model files. Workers and services may enter."""

from tandem.worker.serving import conversion
from tandem.worker.serving.adapters import AdapterService
from tandem.worker.serving.model_files import ModelFilesService
from tandem.worker.serving.service import BUG, Entry, WorkService, failure_of
from tandem.worker.serving.streams import Streams
from tandem.worker.serving.suspects import SuspectTurns

__all__ = [
    "BUG",
    "AdapterService",
    "Entry",
    "ModelFilesService",
    "Streams",
    "SuspectTurns",
    "WorkService",
    "conversion",
    "failure_of",
]
