"""A cache of the token ids of texts' beginnings: a conversation's next turn costs only its new text.

    text         <|user|>...<|end|><|assistant|>...<|end|> ... <|end|><|assistant|>
    cuts                          1                      2                        3
    stretches    |-- text, ids ---|----- text, ids ------|------ text, ids -------|

A cut is the end of a divider. A text is cut at the first divider that begins SPACING characters after the last cut, and
so on: a text that continues another is cut at the same places as far as both are equal. It is also cut at its last
divider, where the next turn will continue it.

A stretch is found by its text and by the stretch before it, the first one by the salt of a tenant: no tenant finds, or
learns by timing, what another one has sent. Texts are compared, not digests: what is found is equal.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias
from weakref import ref

from services.gateway.text.checked_ids import CheckedIds

CACHE_BYTES = 32 * 2**20
# Bytes of a stretch besides its text and ids.
STRETCH_BYTES = 512
ID_BYTES = 4
SPACING = 4096  # characters
# Characters searched for cuts, which blocks the event loop for a few milliseconds at most.
MOST_CUT = 2**20
# The number of dividers after the last known cut that are tried as an earlier text's end.
MOST_ENDS = 32
Key: TypeAlias = "tuple[int | str, str]"


@dataclass(slots=True, weakref_slot=True, eq=False)
class TextStretch:
    """Text between two cuts, and its ids.

    Args:
        key: the number of the stretch before it, or the salt; and the text.
        divider: the length of the divider that ends it.
        after: the stretch that was last seen after it, of those that end where SPACING cuts.
    """

    key: Key
    text: str
    ids: bytes
    divider: int
    number: int
    after: ref[TextStretch] | None = None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = len(self.ids) + self.text.__sizeof__() + STRETCH_BYTES


@dataclass(slots=True)
class Untokenized:
    """The uncached rest of a text, in pieces. Each but the text's first begins with the divider before it.

    Args:
        known: the stretches before the pieces.
        begun: the last stretch before the pieces, if it is one that ended an earlier text.
        new: texts of the stretches that the pieces end, and the lengths of their dividers. The last piece ends none.
        made: ids of the pieces, once they are joined.
    """

    pieces: Sequence[str]
    salt: str = ""
    known: Sequence[TextStretch] = ()
    begun: TextStretch | None = None
    new: Sequence[tuple[str, int]] = ()
    made: Sequence[bytes] = ()

    def __len__(self) -> int:
        """Returns the number of characters to be tokenized."""
        return sum(map(len, self.pieces))

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens of the whole text, given those of each piece."""
        cached = self._cached
        return sum(map(len, cached)) // ID_BYTES + sum(lengths) - len(lengths) + (not cached)

    def join(self, pieces: Sequence[CheckedIds]) -> CheckedIds:
        """Returns the ids of the whole text, given those of each piece."""
        cached = self._cached
        self.made = [(ids[1:] if cached or i else ids).tobytes() for i, ids in enumerate(pieces)]
        return CheckedIds.of(b"".join([*cached, *self.made]))

    @property
    def _cached(self) -> list[bytes]:
        cached = [stretch.ids for stretch in self.known]
        return [*cached, self.begun.ids] if self.begun else cached


class PrefixCache:
    """The cached stretches of one tokenizer, least recently used dropped first. For one event loop."""

    def __init__(self, dividers: Sequence[str], most_bytes: int = CACHE_BYTES, spacing: int = SPACING) -> None:
        self._divider = re.compile("|".join(map(re.escape, dividers)))
        self._longest = max(map(len, dividers))
        self._most_bytes, self._spacing = most_bytes, spacing
        self._stretches = OrderedDict[Key, TextStretch]()
        self._numbers = count()
        self.num_bytes = 0

    def find(self, salt: str, text: str) -> Untokenized:
        """Returns the part of a text that remains to be tokenized. Pass it to `keep` once its pieces are joined."""
        known, cut = self._known(salt, text)
        last, begin = known[-1] if known else None, cut
        begun = self._begun(last.number if last else salt, text, cut)
        if begun:
            last, begin = begun, cut + len(begun.text)
        spans, new = [(begin - (last.divider if last else 0), begin)], list[tuple[str, int]]()
        for start, stop in self._cuts(text, cut):
            if stop > begin:
                spans.append((start, stop))
                new.append((text[cut:stop], stop - start))
            cut = stop
        stops = [*(stop for _, stop in spans[1:]), len(text)]
        pieces = [text[start:stop] for (start, _), stop in zip(spans, stops, strict=True)]
        return Untokenized(pieces, salt, known, begun, new)

    def keep(self, rest: Untokenized) -> None:
        """Cache a tokenized text.

        A stretch counts as used after its followers, so that a dropped one never has any.
        """
        path, made = list(rest.known), list(rest.made)
        if rest.begun:
            made[0] = rest.begun.ids + made[0]
            self._use(rest.begun)
        for (text, divider), ids in zip(rest.new, made, strict=False):
            key = path[-1].number if path else rest.salt, text
            found = self._stretches.get(key) or TextStretch(key, text, ids, divider, next(self._numbers))
            if path and len(text) - divider >= self._spacing:
                path[-1].after = ref(found)
            path.append(found)
        for stretch in reversed(path):
            self._use(stretch)
        while self.num_bytes > self._most_bytes:
            self.num_bytes -= self._stretches.popitem(last=False)[1].num_bytes

    def _use(self, stretch: TextStretch) -> None:
        """Mark a stretch as the last used one; it may have been dropped while a text was tokenized."""
        if stretch.key in self._stretches:
            self._stretches.move_to_end(stretch.key)
        else:
            self._stretches[stretch.key] = stretch
            self.num_bytes += stretch.num_bytes

    def _known(self, salt: str, text: str) -> tuple[list[TextStretch], int]:
        """Returns the known stretches that a text begins with, cut by SPACING, and their length."""
        known, at, after = list[TextStretch](), 0, None
        before: int | str = salt
        while True:
            found = after() if after else None
            if found is None or not text.startswith(found.text, at):
                cut = self._divider.search(text, at + self._spacing, MOST_CUT)
                found = self._stretches.get((before, text[at : cut.end()])) if cut else None
                if found is None:
                    return known, at
                if known:
                    known[-1].after = ref(found)
            known.append(found)
            at, after, before = at + len(found.text), found.after, found.number

    def _begun(self, before: int | str, text: str, at: int) -> TextStretch | None:
        """Returns the stretch with which an earlier text ended, if this text continues it before the next cut."""
        for _, stop in self._dividers(text, at)[: -MOST_ENDS - 1 : -1]:
            if found := self._stretches.get((before, text[at:stop])):
                return found
        return None

    def _cuts(self, text: str, at: int) -> list[tuple[int, int]]:
        """Returns the dividers at which a text is cut after another cut."""
        cuts = list[tuple[int, int]]()
        while found := self._divider.search(text, at + self._spacing, MOST_CUT):
            cuts.append(found.span())
            at = found.end()
        return cuts + self._dividers(text, at)[-1:]

    def _dividers(self, text: str, at: int) -> list[tuple[int, int]]:
        """Returns the dividers between a cut and the next one."""
        until = min(at + self._spacing + self._longest, MOST_CUT)
        return [found.span() for found in self._divider.finditer(text, at, until)]
