"""Text of one choice.

    tokens -> detokenizer -> stop strings -> thoughts and calls split off, if the request has a plan for them -> Delta

A stop token's own text is not shown. A stop string ends the choice at the token that completes it: later tokens of
the same message do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.text import StopStrings, Tokenizer
from services.gateway.tools import Call, CallPart, Reading, ReadingPlan, joined_parts
from services.gateway.workers import Tokens
from tandem.sampling import SamplingParams
from tandem.v1 import llm_pb2


@dataclass(slots=True)
class Delta:
    """New tokens of one choice with their text, thoughts and calls."""

    choice: int
    text: str
    tokens: Tokens
    offsets: Sequence[int]  # with logprobs: where each token's text begins in the answer, in characters
    finish_reason: llm_pb2.FinishReason
    reasoning: str = ""
    calls: Sequence[Call] = ()  # calls that are complete now
    call_parts: Sequence[CallPart] = ()  # at most one part of each call
    stop_reason: str | int | None = None  # the stop string, or the client's stop token, that ended it
    ends_silently: bool = False  # its last token's text is not shown

    @property
    def is_plain(self) -> bool:
        """True if the delta is text and nothing else."""
        return not (
            self.finish_reason or self.reasoning or self.call_parts
            or self.tokens.logprobs or self.tokens.prompt_logprobs
        )  # fmt: skip

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.finish_reason or self.reasoning or self.call_parts) or bool(
            self.tokens.logprobs or self.tokens.prompt_logprobs
        )


class ChoiceText:
    """Makes deltas of tokens. One object reads one choice, from its first token to its end."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, sampling: SamplingParams, stop_ids: Collection[int],
        plan: ReadingPlan | None = None,
    ) -> None:  # fmt: skip
        """`stop_ids`: the request's stop tokens and the model's end-of-text tokens."""
        self.index = index
        self.num_tokens = self.num_reasoning_tokens = 0
        self.finish_reason: llm_pb2.FinishReason = llm_pb2.FINISH_REASON_UNSPECIFIED
        self._detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens, plan.markers if plan else ())
        self._reader = plan.reader() if plan else None
        self._called = False
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._plain = not sampling.stop and plan is None  # all text is shown immediately
        self._show_stop = sampling.include_stop_str_in_output
        self._stop_ids, self._own_stop_ids = frozenset(stop_ids), sampling.stop_token_ids
        self._length = 0
        self._unseen = sampling.max_tokens == 0  # workers write one token anyway

    def feed(self, tokens: Tokens, finish_reason: llm_pb2.FinishReason) -> Delta:
        """Returns the delta of tokens and of the finish reason that came with them."""
        if self._unseen:
            self.finish_reason = llm_pb2.FINISH_REASON_LENGTH
            return Delta(self.index, "", Tokens([], [], tokens.prompt_logprobs), [], self.finish_reason)
        if self._plain and not finish_reason and not tokens.logprobs:
            text = "".join(map(self._detokenizer.feed, tokens.ids))
            self._length += len(text)
            self.num_tokens += len(tokens.ids)
            return Delta(self.index, text, tokens, (), finish_reason)
        shown, offsets, silent = [], [], False
        last = len(tokens.ids) - 1 if finish_reason == llm_pb2.FINISH_REASON_STOP else -1
        for i, token_id in enumerate(tokens.ids):
            offsets.append(self._length)
            silent = i == last and token_id in self._stop_ids and not self._show_stop
            shown.append("" if silent else self._show(self._detokenizer.feed(token_id)))
            if self._stops.matched is not None:
                finish_reason = llm_pb2.FINISH_REASON_STOP
                tokens = Tokens(tokens.ids[: i + 1], tokens.logprobs[: i + 1], tokens.prompt_logprobs)
                break
        if finish_reason:
            shown.append(self._rest())
        self.num_tokens += len(tokens.ids)
        delta = self._read(shown, tokens, offsets, finish_reason)
        delta.stop_reason, delta.ends_silently = self._stop_reason(tokens, last), silent
        self.finish_reason = delta.finish_reason
        return delta

    def _stop_reason(self, tokens: Tokens, last: int) -> str | int | None:
        """Returns the stop string or token that ended the choice. `last`: index of the token that did, or -1."""
        if self._stops.matched is not None or last < 0:
            return self._stops.matched
        return tokens.ids[last] if tokens.ids[last] in self._own_stop_ids else None

    def _read(
        self, shown: Sequence[str], tokens: Tokens, offsets: list[int], finish_reason: llm_pb2.FinishReason
    ) -> Delta:
        """Returns the delta of shown text. `shown`: the tokens' texts, and perhaps text that was held back."""
        if (reader := self._reader) is None:
            return Delta(self.index, "".join(shown), tokens, offsets, finish_reason)
        found = Reading()
        for i, text in enumerate(shown):
            before = reader.within_thoughts
            found += reader.feed(text)
            self.num_reasoning_tokens += i < len(tokens.ids) and (before or reader.within_thoughts)
        if finish_reason:
            found += reader.finish(cut=finish_reason != llm_pb2.FINISH_REASON_STOP)
        self._called = self._called or bool(found.calls)
        if self._called and finish_reason == llm_pb2.FINISH_REASON_STOP:
            finish_reason = llm_pb2.FINISH_REASON_TOOL_CALLS
        parts = joined_parts(found.parts)
        return Delta(self.index, found.text, tokens, offsets, finish_reason, found.reasoning, found.calls, parts)

    def _show(self, text: str) -> str:
        self._length += len(text)
        return self._stops.feed(text)

    def _rest(self) -> str:
        """Returns the text held back until the end; "" after a stop string."""
        if self._stops.matched is not None:
            return ""
        return self._show(self._detokenizer.flush()) + ("" if self._stops.matched else self._stops.flush())
