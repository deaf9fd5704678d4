"""POST /tokenize and /detokenize, as vLLM has them: what the served model makes of a text, and of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.gateway.access import Caller
from services.gateway.bodies import Incoming
from services.gateway.generation import check_prompt
from services.gateway.http import schema
from services.gateway.http.chat import read_messages, template_options
from services.gateway.http.format import token_text
from services.gateway.llm import LLM
from services.gateway.text import CheckedIds
from services.gateway.tools import read_tools


async def tokenize(llm: LLM, body: Incoming, client: Caller) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = schema.validated(schema.TokenizeBody, body.fields)
    schema.check_tokenize(found)
    llm.front.check_said(found.model)
    if found.model is not None:
        llm.served(found.model, client)
    if found.messages is None:
        text = found.prompt or "" if body.text is None else body.text
        tokens = await llm.encode(text, "prompt", found.add_special_tokens is not False)
    else:
        options = template_options(found, read_tools(found.tools, None, None))
        rendered = body.text
        if rendered is None:
            rendered = await llm.render_chat(read_messages(found.messages), options)
        tokens = await llm.encode_chat(rendered, llm.access.cache_salt(body.owner, ""))
    llm.bounds.check_tokens(len(tokens), "prompt" if found.messages is None else "messages")
    texts = [token_text(llm.model.tokenizer, token) for token in tokens] if found.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": list(tokens), "token_strs": texts}


async def detokenize(llm: LLM, body: Incoming, client: Caller) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = schema.validated(schema.DetokenizeBody, body.fields)
    llm.front.check_said(found.model)
    if found.model is not None:
        llm.served(found.model, client)
    tokens: Sequence[int] = found.tokens
    for read in body.checked():
        assert isinstance(read, CheckedIds)
        tokens = read
    llm.bounds.check_tokens(len(tokens), "tokens")
    check_prompt(tokens, llm.vocab_size, "tokens")
    return {"prompt": await asyncio.to_thread(llm.model.tokenizer.decode, tokens, skip_special_tokens=False)}
