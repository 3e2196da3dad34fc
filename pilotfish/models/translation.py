"""Between two vocabularies: which tokens they share, and the same text in the tokens of the other.

Tokens are compared by the bytes they stand for (`Tokenizer.token_bytes`). It does not know drafters. The one trick: a
text is cut into blocks at places that depend on the text alone, and each block is tokenised by itself, so a text that
grows is tokenised again only from its last cut on, and what lies before a cut never changes.

    the text     [ block | block | block | open: at least MARGIN characters ]
    its tokens   [ fixed ............... | made anew each time              ]

Terms as in Timor et al. 2025, arXiv 2502.05202.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby

from .spelling import SAMPLE
from .tokenizer import Tokenizer

BLOCK, MARGIN = 256, 32  # characters: a block has one to two times as many; that many stay open behind it
_BOUNDARY = re.compile(r"(?<=\S) (?=\S)")  # every tokenizer begins a new piece here


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens that stand for the same in both vocabularies: ``draft_ids[i]`` is ``target_ids[i]``, ascending, each once.

    ends: of those, what ends a text. specials: the target's tokens without a text that the draft has too, by name; they
    are read, never drafted, unless they end a text. coverage: how much of ordinary text (the target's tokens of a
    sample) they make up, 0 to 1.
    """

    target_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    ends: dict[int, int]
    specials: dict[int, int]
    coverage: float

    def __len__(self) -> int:
        return len(self.target_ids)


@lru_cache(maxsize=8)
def shared(draft: Tokenizer, target: Tokenizer, draft_eos: frozenset[int], target_eos: frozenset[int]) -> Shared:
    """Compare two vocabularies. eos: what ends a text of each model. Raises ModelError for tokenizers that cannot be
    read."""
    ends = _ends(draft, target, draft_eos, target_eos)
    theirs, ours = _by_bytes(draft, draft_eos), _by_bytes(target, target_eos)
    spelt = {token: theirs[text] for text, token in ours.items() if text in theirs}
    pairs = sorted({**spelt, **ends}.items())
    specials = {
        token: draft.vocabulary[name]
        for name, token in target.vocabulary.items()
        if token not in target.spelt and name in draft.vocabulary and draft.vocabulary[name] not in draft.spelt
    }
    sample = [t for t in target.encode(SAMPLE, add_special_tokens=False) if t in target.token_bytes]
    seen = [token in spelt for token in sample] or [token in spelt for token in target.token_bytes]
    return Shared(
        tuple(token for token, _ in pairs),
        tuple(token for _, token in pairs),
        ends,
        specials | ends,
        sum(seen) / max(1, len(seen)),
    )


def _by_bytes(tokenizer: Tokenizer, eos: Set[int]) -> dict[bytes, int]:
    """The id for each text. Of several the one that is no byte token, for that one is used; then the lowest."""
    order = sorted(tokenizer.token_bytes.items(), key=lambda item: (item[0] in tokenizer.byte_tokens, item[0]))
    found: dict[bytes, int] = {}
    for token, text in order:
        if text and token not in eos:
            found.setdefault(text, token)
    return found


def _ends(draft: Tokenizer, target: Tokenizer, draft_eos: Set[int], target_eos: Set[int]) -> dict[int, int]:
    """What ends a text: tokens of the same name, else the first of each."""
    names = {name: token for name, token in target.vocabulary.items() if token in target_eos}
    named = {token: draft.vocabulary[name] for name, token in names.items() if draft.vocabulary.get(name) in draft_eos}
    return named or dict([(min(target_eos), min(draft_eos))] if target_eos and draft_eos else [])


@dataclass(slots=True)
class _Place:
    """How far a text was read. ids: of the closed blocks. text: what is open behind them. unfinished: bytes of a
    character that is not complete yet. begins: whether the open text goes on from nothing."""

    num_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    unfinished: bytes = b""
    begins: bool = True


class Translator:
    """The target's texts in the draft's tokens, remembered by the name of their sequence.

    num_ids: rows of the draft model's table; tokens beyond it are left out.
    """

    def __init__(self, draft: Tokenizer, target: Tokenizer, specials: dict[int, int], num_ids: int):
        self.draft, self.target, self.specials, self.num_ids = draft, target, specials, num_ids
        self._places: dict[str, _Place] = {}

    def read(self, sequence: str, tokens: Sequence[int], num_settled: int) -> tuple[list[int], int] | None:
        """The text in the draft's tokens, and how many of them will stay whatever follows; at least the last may not.

        tokens: the target's, of which ``num_settled`` will stay. No special tokens are added. None if there is nothing
        to read, or if the text ends inside a character.
        """
        place = self._places.setdefault(sequence, _Place())
        self._read_on(place, tokens[place.num_tokens : num_settled])
        num_fixed = len(place.ids)
        if num_settled < len(tokens):
            place = replace(place, ids=list(place.ids))
            self._read_on(place, tokens[num_settled:])
        if place.unfinished:
            return None
        ids = [*place.ids, *self._encode(place)]
        return (ids, min(num_fixed, len(ids) - 1)) if ids else None

    def release(self, sequence: str) -> None:
        self._places.pop(sequence, None)

    def _read_on(self, place: _Place, tokens: Sequence[int]) -> None:
        spelt = self.target.token_bytes
        for has_text, group in groupby(tokens, spelt.__contains__):
            if has_text:
                data = b"".join(map(spelt.__getitem__, group))
                if self.target.leads and place.begins and not place.text:
                    data = data.removeprefix(b" ")
                self._append(place, data)
            else:
                self._append(place, b"", final=True)
                place.ids += self._encode(place)
                place.ids += [self.specials[token] for token in group if token in self.specials]
                place.text, place.begins = "", True
        place.num_tokens += len(tokens)

    def _append(self, place: _Place, data: bytes, *, final: bool = False) -> None:
        data = place.unfinished + data
        text, num_used = codecs.utf_8_decode(data, "replace", final)
        place.text, place.unfinished = place.text + text, data[num_used:]
        start = 0
        while (cut := _cut(place.text, start)) is not None:
            place.ids += self._encode(replace(place, text=place.text[start:cut]))
            start, place.begins = cut, False
        place.text = place.text[start:]

    def _encode(self, place: _Place) -> Iterable[int]:
        if not place.text:
            return ()
        begin = place.begins
        ids = self.draft.encode(place.text, add_special_tokens=False) if begin else following(self.draft, place.text)
        return [token for token in ids if token < self.num_ids]


def _cut(text: str, start: int) -> int | None:
    """Where the block that starts here ends; None as long as too little follows."""
    found = _BOUNDARY.search(text, start + BLOCK, start + 2 * BLOCK)
    cut = found.start() if found else start + 2 * BLOCK
    return cut if cut + MARGIN <= len(text) else None


def following(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that goes on from another; with a space too many where no text can begin without."""
    if not tokenizer.leads:
        return tokenizer.encode(text, add_special_tokens=False)
    if text.startswith(" "):
        return tokenizer.encode(text[1:], add_special_tokens=False)
    ids, num_bytes = tokenizer.encode("\n" + text, add_special_tokens=False), 0
    for place, token in enumerate(ids):
        if num_bytes == len(b" \n"):
            return ids[place:]
        num_bytes += len(tokenizer.token_bytes.get(token, b""))
    return tokenizer.encode(text, add_special_tokens=False)


def spelling_out(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that goes on from another, as far as they stand for just this."""
    rest, kept = text.encode(), list[int]()
    for token in following(tokenizer, text):
        piece = tokenizer.token_bytes.get(token)
        if not piece or not rest.startswith(piece):
            break
        kept.append(token)
        rest = rest[len(piece) :]
    return kept
