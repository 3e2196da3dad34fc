"""Prompt lookup: what followed the last time the text ended in these n tokens? (Saxena 2023; vLLM's ``ngram``.)

It does not know the model; tokens are chosen, not drawn, so every rule is exact for them. The one trick: each
request has a table from n-gram to the place after its latest occurrence, extended by the new tokens only, so looking
up costs O(prompt_lookup_max) a step however long the text is. Longest match first.

Where the copied text reaches the end of what is there, copying goes on through the copy itself: a loop in the text
is drafted as a loop.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.draft import EMPTY, Draft, chain
from ..decoding.request import Request
from ..errors import OptionError
from .base import Drafter, Setting

LONGEST, SHORTEST = 4, 2
_LONGEST_COUNTED = 16  # longer matches are trusted no more
_DOUBT = 1.5


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """A bound that is not given follows the other. Raises OptionError for bounds that make no sense."""

    prompt_lookup_max: int | None = field(
        default=None, metadata={"help": f"longest n-gram looked up, {LONGEST} if unset"}
    )
    prompt_lookup_min: int | None = field(
        default=None, metadata={"help": f"shortest n-gram looked up, {SHORTEST} if unset"}
    )

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} must be a whole number from 1, not {value!r}")
        if self.longest < self.shortest:
            raise OptionError(
                f"prompt_lookup_max ({self.longest}) must not be below prompt_lookup_min ({self.shortest})"
            )

    @property
    def longest(self) -> int:
        return self.prompt_lookup_max or max(LONGEST, self.prompt_lookup_min or 0)

    @property
    def shortest(self) -> int:
        return self.prompt_lookup_min or min(SHORTEST, self.longest)


class _Index:
    """Places by n-gram for one text that only grows. A place is the index of the token that followed."""

    __slots__ = ("_indexed", "_places", "longest", "shortest")

    def __init__(self, shortest: int, longest: int):
        self.shortest, self.longest = shortest, longest
        self._places: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams ending before this index are in the table

    def extend(self, text: Sequence[int]) -> None:
        """Take in new tokens. The n-gram at the very end waits until something follows it."""
        for end in range(max(self._indexed, self.shortest), len(text)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._places[tuple(text[end - n : end])] = end
        self._indexed = len(text)

    def find(self, ending: Sequence[int], n: int) -> int | None:
        return self._places.get(tuple(ending[-n:])) if len(ending) >= n else None


class NgramDrafter(Drafter):
    Options = NgramOptions

    def __init__(self, options: NgramOptions | None = None):
        self.options = options or NgramOptions()
        self._own: dict[str, _Index] = {}
        self._reference: dict[str, _Index] = {}
        self._source: dict[str, _Index] = {}

    @classmethod
    def build(cls, options: Any, setting: Setting) -> "NgramDrafter":
        return cls(options)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def release(self, request: Request) -> None:
        self._own.pop(request.id, None)
        self._reference.pop(request.id, None)
        self._source.pop(request.id, None)

    def describe(self) -> str:
        return f"n-grams of {self.options.longest} down to {self.options.shortest} tokens"

    def _propose(self, request: Request, limit: int) -> Draft:
        low, high = self.options.shortest, self.options.longest
        own = self._own.setdefault(request.id, _Index(low, high))
        own.extend(request.tokens if not request.num_guessed else request.tokens[: request.num_settled])
        sources: list[tuple[_Index, Sequence[int]]] = [(own, request.tokens)]
        if request.reference:
            if request.id not in self._reference:
                self._reference[request.id] = _Index(low, high)
                self._reference[request.id].extend(request.reference)
            # The predicted text is the better guess; the request's own text comes second, an encoder's source last.
            sources.insert(0, (self._reference[request.id], request.reference))
        if request.source_ids:
            if request.id not in self._source:
                self._source[request.id] = _Index(low, high)
                self._source[request.id].extend(request.source_ids)
            sources.append((self._source[request.id], request.source_ids))
        for n in range(min(high, len(request.tokens)), low - 1, -1):
            for index, text in sources:
                place = index.find(request.tokens, n)
                if place is not None:
                    copied = _copy(text, place, limit, endless=text is request.tokens)
                    return chain(copied, kind=n, chances=_chances(text, place, request.tokens, limit)[: len(copied)])
        return EMPTY


def _chances(text: Sequence[int], place: int, tokens: Sequence[int], num_nodes: int) -> tuple[float, ...]:
    """A match of m tokens is trusted by m / (m + 1.5), as `suffix` measured it; each token drafted makes m larger."""
    length = 0
    while length < min(place, len(tokens), _LONGEST_COUNTED) and text[place - 1 - length] == tokens[-1 - length]:
        length += 1
    each = ((length + node) / (length + node + _DOUBT) for node in range(num_nodes))
    return tuple(itertools.accumulate(each, operator.mul))


def _copy(text: Sequence[int], place: int, limit: int, *, endless: bool) -> list[int]:
    copied = list(text[place : place + limit])
    period = len(text) - place
    while endless and len(copied) < limit:
        copied.append(copied[-period])
    return copied
