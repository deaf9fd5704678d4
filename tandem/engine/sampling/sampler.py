"""The sampler: tokens from logits, all rows of a step together.

    logits ─ logit_bias ─ repetition, presence, frequency ─ masks ─ grammar ─┬─ temperature 0: argmax
                                                                             └─ / temperature ─ filters ─ draw
    logits ─ log_softmax ─> logprobs: the model's own, before any of the above

A row's token depends on that row alone. Filters (top_k, top_p, min_p) are thresholds on values, so all tied tokens are
kept, in whatever order a sort leaves them. The draw turns one number made from (seed, token index) into a token by the
inverse CDF over the vocabulary in its natural order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.device import sent
from tandem.engine.sampling.guided import Masks, forbidden, masks_of
from tandem.engine.sampling.thinking import end_of_thoughts
from tandem.engine.scheduling import Row
from tandem.engine.types import SampledToken
from tandem.sampling import SamplingParams

_NARROW = 256
_CHUNK = 64
_LN_2 = math.log(2)
NO_TOKEN = "the model's logits are not finite numbers"
_GOLDEN = 0x9E3779B97F4A7C15


class Choose(Protocol):
    """A function that picks each row's token: `choose`, or the kernels' equivalent."""

    def __call__(self, logits: Tensor, seqs: Rows[Row], masks: Masks | None = None) -> list[int]:
        """Returns a token id for each row of `logits` (rows, vocab_size) float32; -1 if its maximum is not finite.

        With `masks`, picks only tokens whose bits are set. May overwrite `logits`.
        """


def sample(logits: Tensor, seqs: Rows[Row], choose: Choose) -> list[SampledToken]:
    """Returns one token for each row of `logits` (rows, vocab_size) float32; row i is that of `seqs[i]`.

    Sets `error` of a row whose maximum is not finite.
    """
    token_ids = draw(logits, seqs, choose)
    if -1 in token_ids:
        for seq, token_id in zip(seqs, token_ids, strict=True):
            if token_id == -1:
                seq.error = NO_TOKEN
    return _report(logits, seqs, token_ids)


def draw(logits: Tensor, seqs: Rows[Row], choose: Choose) -> list[int]:
    """Returns the token ids of `sample`, -1 where none can be drawn.

    If a grammar and the other parameters together leave no token, as when the grammar ends before min_tokens, the
    grammar alone decides.
    """
    if all(seq.takes_logits_as_they_are for seq in seqs):
        return choose(logits, seqs)
    masks = masks_of(seqs, logits.shape[1])
    token_ids = choose(_adjust(logits.clone(), seqs), seqs, masks)
    if masks is not None and -1 in token_ids:
        again = [row for row, token_id in enumerate(token_ids) if token_id == -1 and seqs[row].guide is not None]
        found = choose(logits[again], [seqs[row] for row in again], masks[again]) if again else []
        for row, token_id in zip(again, found, strict=True):
            token_ids[row] = token_id
    return token_ids


def uniform(seed: int, index: int) -> float:
    """Returns the random number in [0, 1) of token `index`: SplitMix64 (Steele, Lea, Flood 2014), applied twice."""
    # With 48 bits the number times any float64 total stays below that total.
    return (_mix(_mix(seed + _GOLDEN) + (index + 1) * _GOLDEN) >> 16) / 2.0**48


def _mix(z: int) -> int:
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _adjust(logits: Tensor, seqs: Rows[Row]) -> Tensor:
    _add_bias(logits, seqs)
    _penalize_repetition(logits, seqs)
    _penalize_counts(logits, seqs)
    _mask_stop_tokens(logits, seqs)
    _mask_other_tokens(logits, seqs)
    _mask_bad_words(logits, seqs)
    _end_thoughts(logits, seqs)
    return logits


def _add_bias(logits: Tensor, seqs: Rows[Row]) -> None:
    entries = [(row, *item) for row, seq in enumerate(seqs) for item in seq.sampling.logit_bias.items()]
    if entries:
        rows, ids, values = zip(*entries, strict=True)
        logits[list(rows), list(ids)] += logits.new_tensor(values)


def _penalize_repetition(logits: Tensor, seqs: Rows[Row]) -> None:
    """Divides positive and multiplies negative scores of every token in the prompt or the answer by the penalty."""
    penalized = [row for row, seq in enumerate(seqs) if seq.sampling.repetition_penalty != 1.0]
    if not penalized:
        return
    rows, cells = _seen(penalized, [_ids(seqs[row], 0) for row in penalized], logits)
    penalty = _per_row(logits, seqs, lambda sampling: sampling.repetition_penalty).index_select(0, rows)
    flat = logits.view(-1)  # gather and scatter along one dimension are ten times as fast
    scores = flat.index_select(0, cells)
    flat.scatter_(0, cells, torch.where(scores > 0, scores / penalty, scores * penalty))


def _penalize_counts(logits: Tensor, seqs: Rows[Row]) -> None:
    """Subtracts presence_penalty once and frequency_penalty per occurrence for every token in the answer."""
    penalized = [
        row for row, seq in enumerate(seqs)
        if seq.num_output_tokens and (seq.sampling.presence_penalty or seq.sampling.frequency_penalty)
    ]  # fmt: skip
    if not penalized:
        return
    _, cells = _seen(penalized, [_ids(seqs[row], seqs[row].answer_start) for row in penalized], logits)
    cells, counts = torch.unique(cells, return_counts=True)
    rows = cells // logits.shape[1]
    presence = _per_row(logits, seqs, lambda sampling: sampling.presence_penalty)[rows]
    frequency = _per_row(logits, seqs, lambda sampling: sampling.frequency_penalty)[rows]
    logits.view(-1)[cells] -= presence + frequency * counts


def _mask_stop_tokens(logits: Tensor, seqs: Rows[Row]) -> None:
    for row, seq in enumerate(seqs):
        if seq.num_output_tokens < seq.sampling.min_tokens:
            # Ids beyond the vocabulary are left out: they can never be sampled.
            logits[row, [t for t in seq.sampling.stop_token_ids if 0 <= t < logits.shape[1]]] = -math.inf


def _mask_other_tokens(logits: Tensor, seqs: Rows[Row]) -> None:
    for row, seq in enumerate(seqs):
        if seq.sampling.allowed_token_ids:
            allowed = list(seq.sampling.allowed_token_ids)
            kept = logits[row, allowed]
            logits[row] = -math.inf
            logits[row, allowed] = kept


def _mask_bad_words(logits: Tensor, seqs: Rows[Row]) -> None:
    """Masks the last token of each bad word if the answer ends with the word's other tokens."""
    for row, seq in enumerate(seqs):
        for *before, last in seq.sampling.bad_words_token_ids:
            start = len(seq.token_ids) - len(before)
            if start >= seq.answer_start and seq.token_ids[start:].tolist() == before:
                logits[row, last] = -math.inf


def _end_thoughts(logits: Tensor, seqs: Rows[Row]) -> None:
    """Forces the end mark on rows whose thoughts have used up their budget."""
    for row, seq in enumerate(seqs):
        if (token_id := end_of_thoughts(seq)) is not None:
            logits[row] = -math.inf
            logits[row, token_id] = 0.0


def _ids(seq: Row, start: int) -> Tensor:
    """Views the sequence's tokens from `start` on without a copy; drop the view before the sequence grows."""
    return torch.frombuffer(seq.token_ids, dtype=torch.int64, offset=start * seq.token_ids.itemsize)


def _seen(rows: list[int], ids: list[Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row of each token in `ids` and the token's index in the flattened `logits`."""
    of_each = torch.tensor(rows).repeat_interleave(torch.tensor([len(row_ids) for row_ids in ids]))
    return sent(of_each, logits.device), sent(of_each * logits.shape[1] + torch.cat(ids), logits.device)


def _per_row(logits: Tensor, seqs: Rows[Row], read: Callable[[SamplingParams], float]) -> Tensor:
    return logits.new_tensor([read(seq.sampling) for seq in seqs])


def choose(logits: Tensor, seqs: Rows[Row], masks: Masks | None = None) -> list[int]:
    """Picks each row's token in torch, on any device; see Choose. This is the step's only wait for the device."""
    if masks is not None:
        logits = logits.masked_fill(forbidden(masks, logits), -math.inf)
    token_ids: list[int] = chosen(logits, seqs).tolist()
    return token_ids


def chosen(logits: Tensor, seqs: Rows[Row]) -> Tensor:
    """Returns the tokens that `choose` picks, (rows,) on the device, without waiting for the device."""
    best = logits.max(dim=-1)
    token_ids = best.indices
    drawn = [row for row, seq in enumerate(seqs) if seq.sampling.temperature > 0]
    if drawn:
        params = [seqs[row].sampling for row in drawn]
        uniforms = [uniform(seqs[row].sampling.seed, seqs[row].num_output_tokens) for row in drawn]
        rows = _sent(drawn, logits, torch.int64)
        token_ids[rows] = _draw(logits[rows], params, uniforms)
    return token_ids.masked_fill(~best.values.isfinite(), -1)


def _sent(values: Rows[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sends values to the device of `like` without waiting for it, as `new_tensor` would."""
    return sent(torch.tensor(values, dtype=dtype or like.dtype), like.device)


def _draw(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """Draws a token of each row: first its chunk, by the chunks' sums, then the token within the chunk.

    The result of a row without a finite maximum is arbitrary.
    """
    temperatures = _sent([sampling.temperature * _LN_2 for sampling in params], logits)[:, None]
    # With an infinite temperature a masked token would become NaN.
    temperatures.clamp_(max=torch.finfo(temperatures.dtype).max)
    # Weights are powers of two, for exp takes three times as long as exp2. The maximum is 0, so no weight overflows.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    if any(sampling.top_k or sampling.top_p < 1 or sampling.min_p for sampling in params):
        scaled.masked_fill_(scaled < _thresholds(scaled, params)[:, None], -math.inf)
    chunks = _chunks(scaled.exp2_(), 0.0)
    cdf = chunks.sum(dim=-1).double().cumsum(dim=-1)
    targets = _sent(uniforms, cdf)[:, None] * cdf[:, -1:]
    chunk = _first_above(cdf, targets)
    inside = _pick(chunks, chunk).double().cumsum(dim=-1)
    left = targets - pad(cdf, (1, 0)).gather(1, chunk)
    # The chunk's sum may have been rounded up. Capped below the total of the chunk's own cdf, the target always finds a
    # token with some weight.
    below = inside[:, -1:].nextafter(inside.new_zeros(()))
    return (chunk * _CHUNK + _first_above(inside, left.minimum(below)))[:, 0]


def _chunks(values: Tensor, fill: float) -> Tensor:
    """Views (rows, vocab_size) as (rows, chunks, _CHUNK), padding the last chunk with `fill`."""
    if missing := -values.shape[1] % _CHUNK:
        values = pad(values, (0, missing), value=fill)
    return values.view(len(values), -1, _CHUNK)


def _pick(chunks: Tensor, chunk: Tensor) -> Tensor:
    """Returns one chunk of each row: (rows, _CHUNK)."""
    return chunks[torch.arange(len(chunks), device=chunks.device), chunk[:, 0]]


def _first_above(cdf: Tensor, targets: Tensor) -> Tensor:
    return torch.searchsorted(cdf, targets, right=True).clamp_(max=cdf.shape[1] - 1)


def _thresholds(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Returns the least value in each row that top_k, top_p and min_p keep: (rows,)."""
    lowest = _sent([sampling.min_p for sampling in params], scaled).log2()
    top_k = [row for row, sampling in enumerate(params) if sampling.top_k > 0]
    if top_k:
        _raise_to_top_k(lowest, scaled, top_k, params)
    nucleus = [row for row, sampling in enumerate(params) if sampling.top_k == 0 and sampling.top_p < 1]
    # Most nuclei lie within a few tokens, and a whole sort is slow. On a GPU, waiting to learn which do is slower.
    for width in (_NARROW, scaled.shape[1]) if scaled.is_cpu else (scaled.shape[1],):
        if nucleus:
            nucleus = _raise_to_top_p(lowest, scaled, nucleus, params, width)
    return lowest


def _raise_to_top_k(lowest: Tensor, scaled: Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    """Raises the thresholds of `rows` to those of top_k and, within it, top_p."""
    k, where = [min(params[row].top_k, scaled.shape[1]) for row in rows], _sent(rows, scaled, torch.int64)
    best = _best(scaled[where], max(k))
    best = best.masked_fill(torch.arange(best.shape[1], device=best.device) >= _sent(k, scaled)[:, None], -math.inf)
    needed = _needed(best, best.exp2().sum(dim=-1), [params[row].top_p for row in rows]) & best.isfinite()
    lowest[where] = lowest[where].maximum(best.masked_fill(~needed, math.inf).amin(dim=-1))


def _raise_to_top_p(
    lowest: Tensor, scaled: Tensor, rows: list[int], params: list[SamplingParams], width: int
) -> list[int]:
    """Raises the thresholds of `rows` to top_p if the nucleus lies within the `width` best; returns the other rows."""
    where = _sent(rows, scaled, torch.int64)
    here = scaled[where]
    best = _best(here, width)
    needed = _needed(best, here.exp2().sum(dim=-1), [params[row].top_p for row in rows])
    value = best.masked_fill(~needed, math.inf).amin(dim=-1)
    if width >= scaled.shape[1]:
        lowest[where] = lowest[where].maximum(value)
        return []
    within = ~needed[:, -1]
    lowest[where] = torch.where(within, lowest[where].maximum(value), lowest[where])
    return [row for row, done in zip(rows, within.tolist(), strict=True) if not done]


def _best(values: Tensor, width: int) -> Tensor:
    """Returns the `width` largest values of each row, descending."""
    if width < values.shape[1]:
        return values.topk(width).values
    return values.sort(dim=-1, descending=True).values


def _needed(best: Tensor, total: Tensor, top_p: list[float]) -> Tensor:
    """Marks the values of `best` (rows, width), descending, that the nucleus of top_p needs.

    `total` (rows,) is the mass that top_p is a part of.
    """
    probs = best.double().exp2() / total[:, None]
    limit = _sent([p if p < 1 else math.inf for p in top_p], probs)
    return probs.cumsum(dim=-1) - probs < limit[:, None]


def _report(logits: Tensor, seqs: Rows[Row], token_ids: list[int]) -> list[SampledToken]:
    """Returns the tokens, with log-probabilities for rows that want them."""
    tokens = list(map(SampledToken, token_ids))
    wanted = [row for row, seq in enumerate(seqs) if seq.sampling.logprobs is not None]
    if not wanted:
        return tokens
    most = max(seqs[row].sampling.logprobs or 0 for row in wanted)
    of_rows = reported(logits[wanted], [token_ids[row] for row in wanted], most)
    for row, token in zip(wanted, of_rows, strict=True):
        sampling = seqs[row].sampling
        tokens[row] = token._replace(top=token.top[: sampling.logprobs])
        if named := sampling.logprob_token_ids:
            values = logits[row].log_softmax(dim=-1)[list(named)].tolist()
            tokens[row] = token._replace(top=tuple(zip(named, values, strict=True)))
    return tokens


def reported(logits: Tensor, token_ids: Rows[int], most: int) -> list[SampledToken]:
    """Returns each row's token with its log-probability, its rank and the `most` most likely tokens."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs[range(len(token_ids)), list(token_ids)]
    ranks = (logprobs >= chosen[:, None]).sum(dim=-1).tolist()
    best = logprobs.topk(most)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        SampledToken(token_id, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token_id, logprob, rank, (ids, values) in zip(token_ids, chosen.tolist(), ranks, tops, strict=True)
    ]
