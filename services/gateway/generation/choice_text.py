"""Text of one choice.

    tokens -> detokenizer -> stop strings -> thoughts and calls apart, where the request has a plan for them -> Delta

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
    """New tokens of one choice, and all that they say."""

    choice: int
    text: str
    tokens: Tokens
    offsets: Sequence[int]  # where each token's text begins in the answer, in characters; with logprobs
    finish_reason: llm_pb2.FinishReason
    reasoning: str = ""
    calls: Sequence[Call] = ()  # that are complete now
    call_parts: Sequence[CallPart] = ()  # at most one of each call
    stop_reason: str | int | None = None  # the stop string, or token of the client's own, that ended it
    ends_silently: bool = False  # the text of its last token is not shown

    @property
    def is_plain(self) -> bool:
        """True if it is text and nothing else."""
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
        """`stop_ids`: with the model's own ends of text."""
        self.index = index
        self.num_tokens = self.num_reasoning_tokens = 0
        self.finish_reason: llm_pb2.FinishReason = llm_pb2.FINISH_REASON_UNSPECIFIED
        self._detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens, plan.markers if plan else ())
        self._reader = plan.reader() if plan else None
        self._called = False
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._plain = not sampling.stop and plan is None  # all text is shown, as it comes
        self._show_stop = sampling.include_stop_str_in_output
        self._stop_ids, self._own_stop_ids = frozenset(stop_ids), sampling.stop_token_ids
        self._length = 0
        self._unseen = sampling.max_tokens == 0  # workers write a token all the same

    def feed(self, tokens: Tokens, finish_reason: llm_pb2.FinishReason) -> Delta:
        """Take tokens as they came, and the finish reason that came with them."""
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
        """`last`: where the token is that ended it; below 0 where none did."""
        if self._stops.matched is not None or last < 0:
            return self._stops.matched
        return tokens.ids[last] if tokens.ids[last] in self._own_stop_ids else None

    def _read(
        self, shown: Sequence[str], tokens: Tokens, offsets: list[int], finish_reason: llm_pb2.FinishReason
    ) -> Delta:
        """`shown`: the text of each token, and perhaps what was held back."""
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
        """Text that was held back, at the end; nothing behind a stop string."""
        if self._stops.matched is not None:
            return ""
        return self._show(self._detokenizer.flush()) + ("" if self._stops.matched else self._stops.flush())
