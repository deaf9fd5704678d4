"""A worker's services for gateways: streams, suspects, adapters, model files. Workers and services may enter."""

from tandem.worker.work import conversion
from tandem.worker.work.adapters import AdapterService
from tandem.worker.work.model_files import ModelFilesService
from tandem.worker.work.service import BUG, Entry, WorkService, failure_of
from tandem.worker.work.streams import Streams
from tandem.worker.work.suspects import SuspectTurns

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
