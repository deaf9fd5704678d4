"""Bounds of bodies: of those read on the event loop, of the fields beside a prompt, and of prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.errors import InvalidRequest
from services.gateway.text import CheckedIds
from tandem.sampling import InvalidParameter, check_token_ids

LARGE = 256 * 1024  # bytes
MANY = 20_000  # values
MOST_BESIDE = 2**20  # bytes of a large body besides its prompt: a schema or grammar may be long
MAX_KEPT = 2**31 - 1  # tokens of a prompt that is truncated
TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """The largest prompts that a model takes, and the most choices that a gateway allows."""

    prompts: int
    tokens: int
    characters: int
    vocab_size: int

    def check_characters(self, length: int, param: str) -> None:
        """Refuse a text that is too long to be tokenized, which takes a second for each 500,000 characters.

        Raises InvalidRequest.
        """
        if length > self.characters:
            raise InvalidRequest(
                f"this model's maximum context length is {self.tokens} tokens, at most {self.characters} characters, "
                f"but {param} has {length}", param, "context_length_exceeded",
            )  # fmt: skip

    def check_choices(self, prompts: int, n: int) -> None:
        """Raises InvalidRequest: more answers in one request than the gateway allows."""
        if prompts * n > self.prompts:
            raise InvalidRequest(f"n: at most {self.prompts} choices, got {prompts * n}", "n")

    def check_tokens(self, count: int, param: str) -> None:
        """Raises InvalidRequest."""
        if count > self.tokens:
            raise InvalidRequest(
                f"this model's maximum context length is {self.tokens} tokens, but {param} has {count}",
                param, "context_length_exceeded",
            )  # fmt: skip

    def check_ids(self, prompt: Sequence[int], param: str) -> None:
        """Raises InvalidRequest: a token of the prompt is not in the vocabulary."""
        try:
            check_token_ids(param, prompt, self.vocab_size)
        except InvalidParameter as error:
            raise InvalidRequest(str(error), param) from None

    def check_length(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> None:
        """Raises InvalidRequest: the prompt is empty, or it and the answer do not fit the model's context."""
        if not prompt:
            raise InvalidRequest(f"{param} must not be empty", param)
        wanted = len(prompt) + (max_tokens or 1)
        if wanted > self.tokens:
            answer = f"{max_tokens} tokens of answer" if max_tokens else "at least 1 token of answer"
            raise InvalidRequest(
                f"this model's maximum context length is {self.tokens} tokens, but the request needs {wanted}: "
                f"{len(prompt)} of {param} and {answer}", param, "context_length_exceeded",
            )  # fmt: skip


def truncated(prompt: Sequence[int], keep: int | None) -> Sequence[int]:
    """Returns the last `keep` tokens; all of them where that is None. Raises InvalidRequest."""
    if keep is None:
        return prompt
    if not 1 <= keep <= MAX_KEPT:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be between 1 and {MAX_KEPT}, got {keep}", "truncate_prompt_tokens"
        )
    kept = prompt[-keep:]
    return CheckedIds("I", kept) if isinstance(prompt, CheckedIds) else kept


def is_large(body: bytes) -> bool:
    return len(body) > LARGE or has_many(body)


def has_many(body: bytes) -> bool:
    """True if parsing would take more than a few milliseconds, by the number of brackets and commas, texts included."""
    return len(body) > MANY and sum(map(body.count, (b"[", b"{", b","))) > MANY


def small(fields: bytes, prompt: str) -> bytes:
    """Raises InvalidRequest: the other fields are large, too."""
    if len(fields) > MOST_BESIDE or has_many(TEXT.sub(b"", fields)):
        said = f"besides {prompt} the body must not have more than {MOST_BESIDE} bytes or {MANY} values"
        raise InvalidRequest(said, code="body_too_large")
    return fields
