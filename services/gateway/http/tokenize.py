"""POST /tokenize and /detokenize, as vLLM has them: what the served model makes of a text, and of tokens."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.generation import check_prompt
from services.gateway.http import schema
from services.gateway.http.chat import read_messages, template_options
from services.gateway.http.format import token_text
from services.gateway.llm import LLM
from services.gateway.tools import read_tools


async def tokenize(llm: LLM, body: bytes) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = schema.validated(schema.TokenizeBody, body)
    if found.model is not None:
        llm.served(found.model)
    if (found.prompt is None) == (found.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is required", "prompt")
    if found.messages is not None:
        options = template_options(found, read_tools(found.tools, None, None))
        tokens = await llm.encode_chat(read_messages(found.messages), options)
    else:
        tokens = await llm.encode(found.prompt or "", "prompt", found.add_special_tokens is not False)
    texts = [token_text(llm.model.tokenizer, token) for token in tokens] if found.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": texts}


async def detokenize(llm: LLM, body: bytes) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = schema.validated(schema.DetokenizeBody, body)
    if found.model is not None:
        llm.served(found.model)
    check_prompt(found.tokens, llm.model.tokenizer.vocab_size, "tokens")
    return {"prompt": llm.model.tokenizer.decode(found.tokens, skip_special_tokens=False)}
