"""A model's chat template, found in the files where transformers looks for it.

chat_template.jinja, and for chats with tools additional_chat_templates/tool_use.jinja; where there is neither,
`chat_template` of tokenizer_config.json: one template, or several by name, of which one may be named tool_use.
"""

from __future__ import annotations

from pathlib import Path

from services.gateway.untrusted import ChatTemplate
from tandem.checkpoints import TOOL_TEMPLATE, read_bytes, read_tokenizer_config, special_tokens

MAX_BYTES = 2**20


def read_template(folder: Path) -> ChatTemplate | None:
    """Returns the folder's template, not yet checked; None if the model has none.

    Raises:
        OSError, ValueError: a file is malformed.
    """
    named = _beside(folder)
    said = None if named else read_tokenizer_config(folder).chat_template
    if said is not None:
        named = {"default": said} if isinstance(said, str) else {one.name: one.template for one in said}
    if not named.get("default"):
        return None
    if sum(map(len, named.values())) > MAX_BYTES:
        raise ValueError(f"{folder}: chat_template: at most {MAX_BYTES} characters")
    tokens = special_tokens(folder)
    for_tools = ChatTemplate(named["tool_use"], tokens) if "tool_use" in named else None
    return ChatTemplate(named["default"], tokens, for_tools=for_tools)


def _beside(folder: Path) -> dict[str, str]:
    """Returns the templates that are files of their own."""
    found = {}
    for name, file in (("default", folder / "chat_template.jinja"), ("tool_use", folder / TOOL_TEMPLATE)):
        if file.is_file():
            try:
                found[name] = read_bytes(file).decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: {error}") from None
    return found
