"""The formats by their names for --tool-parser, and how a chat template shows which one is the model's."""

from __future__ import annotations

from services.gateway.tools.call import CallFormat
from services.gateway.tools.formats.deepseek import DeepSeek
from services.gateway.tools.formats.glm4 import Glm4
from services.gateway.tools.formats.granite import Granite
from services.gateway.tools.formats.harmony import Harmony
from services.gateway.tools.formats.hermes import Hermes
from services.gateway.tools.formats.llama3_json import Llama3Json
from services.gateway.tools.formats.mistral import Mistral
from services.gateway.tools.formats.phi4_mini import Phi4Mini
from services.gateway.tools.formats.pythonic import Pythonic
from services.gateway.tools.formats.qwen3_coder import Qwen3Coder

FORMATS: dict[str, type[CallFormat]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "deepseek": DeepSeek,
    "granite": Granite,
    "phi4_mini": Phi4Mini,
    "glm4": Glm4,
    "harmony": Harmony,
}
# The first format with a mark in the template is the model's.
MARKS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("请使用 Json 格式表示调用的参数", "glm4"),
    ("<|/tool|>", "phi4_mini"),
    ("<|tool_call|>", "granite"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)


def detect_format(template: str) -> str | None:
    return next((name for mark, name in MARKS if mark in template), None)
