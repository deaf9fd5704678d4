"""One chat, from any API, up to what the pipeline takes: token ids, sampling parameters, and how its answer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.bodies import ChatPrompt, truncated
from services.gateway.directory import LLM
from services.gateway.generation import Structure, check_salt, held_to
from services.gateway.model import budget_of
from services.gateway.tools import ReadingPlan, ToolUse, plan_reading
from tandem.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat as its API's body asks for it.

    Attributes:
        prompt: turns and options, or the text that a helper process has rendered of them.
        use: the tools that the answer may call.
        structure: the form that the answer must have.
        effort: how long the model is to think, by OpenAI's names.
        given: sampling parameters.
        names: the API's names of sampling parameters, where they are others than ours.
        keep_last: prompt tokens to keep, the last ones; None keeps all.
        clips: `max_tokens` may exceed the room that the context has left.
    """

    prompt: ChatPrompt | str
    use: ToolUse | None = None
    structure: Structure | None = None
    effort: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    salt: str = ""
    keep_last: int | None = None
    clips: bool = False


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat as the pipeline takes it."""

    ids: Sequence[int]
    given: Mapping[str, Any]
    sampling: SamplingParams
    reading: ReadingPlan | None


async def prepare(llm: LLM, chat: ChatRequest, tenant: str) -> PreparedChat:
    """Render and tokenize a chat, and check its sampling parameters. Raises GatewayError."""
    given = budget_of(chat.effort, llm.model) | dict(chat.given)
    text = chat.prompt if isinstance(chat.prompt, str) else await llm.render_chat(chat.prompt)
    reading = plan_reading(llm.model.thoughts, llm.model.calls, chat.use, text)
    structure = held_to(chat.use, chat.structure, reading, llm.model.tokenizer)
    ids = await llm.encode_chat(text, llm.shared.access.cache_salt(tenant, check_salt(chat.salt)))
    if chat.clips and "max_tokens" in given:
        given["max_tokens"] = min(given["max_tokens"], max(1, llm.max_model_len - len(ids)))
    sampling = await llm.sampling(given, chat.names, structure, tenant)
    return PreparedChat(truncated(ids, chat.keep_last), given, sampling, reading)
