"""POST /tokenize and /detokenize, as vLLM has them: text to the model's tokens and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.gateway.apis.chat import chat_in
from services.gateway.apis.openai import schema
from services.gateway.apis.openai.envelope import token_text
from services.gateway.bodies import ChatPrompt, Incoming, Prompt, PromptBounds
from services.gateway.directory import LLM
from services.gateway.errors import InvalidRequest
from services.gateway.tools import read_tools
from services.gateway.untrusted import ChatTemplate


class TokenizeReader(schema.JsonReader[schema.TokenizeBody]):
    def parse(self, data: bytes) -> schema.TokenizeBody:
        found = schema.validated(schema.TokenizeBody, data)
        if (found.prompt is None) == (found.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", "prompt")
        return found

    def prompts(
        self, body: schema.TokenizeBody, bounds: PromptBounds, template: ChatTemplate | None
    ) -> ChatPrompt | Sequence[Prompt]:
        if body.prompt is not None:
            return [body.prompt]
        return chat_in(body, read_tools(body.tools, None, None))

    def param(self, body: schema.TokenizeBody) -> str:
        return "messages" if body.prompt is None else "prompt"

    def dump(self, body: schema.TokenizeBody) -> bytes:
        param = self.param(body)
        setattr(body, param, "" if param == "prompt" else [])
        return schema.dumped(body, param)


class DetokenizeReader(schema.JsonReader[schema.DetokenizeBody]):
    kind, field, taken = schema.DetokenizeBody, "tokens", list[int]()

    def prompts(
        self, body: schema.DetokenizeBody, bounds: PromptBounds, template: ChatTemplate | None
    ) -> Sequence[Prompt]:
        return [body.tokens]


TOKENIZE, DETOKENIZE = TokenizeReader(), DetokenizeReader()


async def tokenize(llm: LLM, body: Incoming[schema.TokenizeBody]) -> dict[str, Any]:
    """Raises GatewayError."""
    found, param = body.body, body.reader.param(body.body)
    text = await llm.text_of(body)
    if param == "prompt":
        tokens = await llm.encode(text, param, found.add_special_tokens is not False)
    else:
        tokens = await llm.encode_chat(text, llm.shared.access.cache_salt(body.owner, ""))
    llm.bounds.check_tokens(len(tokens), param)
    texts = [token_text(llm.model.tokenizer, token) for token in tokens] if found.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": list(tokens), "token_strs": texts}


async def detokenize(llm: LLM, body: Incoming[schema.DetokenizeBody]) -> dict[str, Any]:
    """Raises GatewayError."""
    (tokens,) = llm.prompts_in(body)
    assert not isinstance(tokens, str)
    llm.bounds.check_tokens(len(tokens), "tokens")
    llm.bounds.check_ids(tokens, "tokens")
    return {"prompt": await asyncio.to_thread(llm.model.tokenizer.decode, tokens, skip_special_tokens=False)}
