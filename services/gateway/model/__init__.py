"""The served model as clients see it: words, chat format, defaults, adapters, thinking. The gateway may enter."""

from services.gateway.model.adapters import ServedAdapters
from services.gateway.model.fetch import ModelFolders
from services.gateway.model.reader import ModelReader
from services.gateway.model.reasoning import budget_of, template_variables
from services.gateway.model.served import ServedModel

__all__ = [
    "ModelFolders",
    "ModelReader",
    "ServedAdapters",
    "ServedModel",
    "budget_of",
    "template_variables",
]
