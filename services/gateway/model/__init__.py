"""The served model as clients see it: tokenizer, chat format, defaults, adapters, thinking. The gateway may enter."""

from services.gateway.model.adapters import ServedAdapters
from services.gateway.model.aliases import SESSION, ModelAsked, ServedAliases, Via, choose
from services.gateway.model.fetch import ModelFolders
from services.gateway.model.reader import ModelReader
from services.gateway.model.reasoning import budget_of, template_variables
from services.gateway.model.rendering import HELPER_MODULES, ModelHelper
from services.gateway.model.served import CheckedFiles, ServedModel
from services.gateway.model.template_files import read_template

__all__ = [
    "HELPER_MODULES",
    "SESSION",
    "CheckedFiles",
    "ModelAsked",
    "ModelFolders",
    "ModelHelper",
    "ModelReader",
    "ServedAdapters",
    "ServedAliases",
    "ServedModel",
    "Via",
    "budget_of",
    "choose",
    "read_template",
    "template_variables",
]
