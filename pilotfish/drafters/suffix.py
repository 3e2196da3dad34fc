"""Suffix decoding: what followed, and how often, where the text ended like this before? (Oliaro et al. 2024,
arXiv 2411.04975.) It looks in the request's own text, in its reference, and in what finished requests were answered.

It does not know the model; tokens are chosen, not drawn, so every rule is exact for them. The one trick: the suffix
tree is never built. Of every n-gram (n in LEVELS) the latest places are known, so the branch below the text's ending
can be read off the places where it occurred, when it is asked for: memory grows with the tokens alone, forgetting a
text is forgetting its places, and a step costs the same however long the text is.

    text    ... the cat sat on ... the cat ate ... a cat sat ... the cat      matches 2, 2, 1 tokens, weights 16, 16, 4
    tree    sat .32 ── on .17                                      shares of the weights, and what matches that short
            ate .25                                                are worth

A place counts 4 to the power of its match's length: longer contexts decide, shorter ones break ties and fill the
tree. One step on a path is trusted by m / (m + 1.5), m its match's length so far: measured on greedy answers to
Spec-Bench prompts, a lone match of 1, 2, 3, 9 tokens was right in 38, 58, 72, 93 % of the cases.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ..decoding.draft import EMPTY, Draft
from ..decoding.request import Request, Step
from ..errors import OptionError
from .base import Drafter, Setting

LEVELS = (8, 4, 2, 1)
NUM_PLACES = 16  # of an n-gram; older ones say less, and each costs time
_REFERENCE, _OWN, _FINISHED = 4.0, 1.0, 0.25  # a place's worth by source: one token of match more or less
_DOUBT = 1.5
_OPENING = 8  # tokens of the prompt kept before a finished answer, so that answers' beginnings can be met


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """vLLM's names. Raises OptionError for values out of range."""

    suffix_decoding_max_tree_depth: int = field(default=24, metadata={"help": "longest match that is told apart"})
    suffix_decoding_max_spec_factor: float = field(
        default=4.0, metadata={"help": "draft at most this many tokens per token of match"}
    )
    suffix_decoding_min_token_prob: float = field(
        default=0.1, metadata={"help": "least estimated chance of a drafted token to be accepted"}
    )
    suffix_decoding_max_cached_requests: int = field(
        default=10_000, metadata={"help": "finished answers that are remembered; 0: none"}
    )
    suffix_decoding_max_cached_tokens: int = field(
        default=1 << 17, metadata={"help": "their tokens in all, about 0.5 KB each"}
    )
    suffix_decoding_trees: bool = field(default=True, metadata={"help": "let drafts branch where they may"})

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_tree_depth", 1, 256),
            ("max_cached_requests", 0, None),
            ("max_cached_tokens", 0, None),
        ):
            value = getattr(self, f"suffix_decoding_{name}")
            if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
                to = f" to {most}" if most else ""
                raise OptionError(f"suffix_decoding_{name} must be a whole number from {least}{to}, not {value!r}")
        factor, chance = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if isinstance(factor, bool) or not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
            raise OptionError(f"suffix_decoding_max_spec_factor must be a number above 0, not {factor!r}")
        if isinstance(chance, bool) or not (isinstance(chance, (int, float)) and 0 <= chance <= 1):
            raise OptionError(f"suffix_decoding_min_token_prob must be in [0, 1], not {chance!r}")
        if not isinstance(self.suffix_decoding_trees, bool):
            raise OptionError(f"suffix_decoding_trees must be True or False, not {self.suffix_decoding_trees!r}")


@dataclass(slots=True)
class _Match:
    """A place where a text goes on after the same ``length`` tokens as ours ends in. endless: it is our own text, and
    where it ends the draft itself goes on."""

    text: Sequence[int]
    place: int
    length: int
    weight: float
    endless: bool = False


class _Places:
    """The latest places of each n-gram, oldest first. A place is a number that its owner can read."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table: dict[int, list[int]] = {}  # by hash: whoever reads a place compares tokens anyway

    def __len__(self) -> int:
        return len(self._table)

    def add(self, text: Sequence[int], start: int, first_place: int) -> None:
        """Take in the places ``start`` and later of a text; the place at index 0 would be ``first_place``."""
        table = self._table
        for end in range(max(start, 1), len(text)):
            for n in LEVELS:
                if n <= end:
                    found = table.setdefault(hash(tuple(text[end - n : end])), [])
                    found.append(first_place + end)
                    if len(found) > NUM_PLACES:
                        del found[0]

    def remove(self, text: Sequence[int], first_place: int) -> None:
        table = self._table
        for end in range(1, len(text)):
            for n in LEVELS:
                if n <= end and (found := table.get(key := hash(tuple(text[end - n : end])))):
                    if first_place + end in found:
                        found.remove(first_place + end)
                    if not found:
                        del table[key]

    def find(self, ending: Sequence[int]) -> list[int]:
        """Places after the ending's n-grams, longest first and latest first, NUM_PLACES or a few more."""
        found: dict[int, None] = {}
        for n in LEVELS:
            if n <= len(ending):
                found |= dict.fromkeys(reversed(self._table.get(hash(tuple(ending[-n:])), ())))
                if len(found) >= NUM_PLACES:
                    break
        return list(found)


class _Text:
    """One text that only grows."""

    __slots__ = ("_num_tokens", "_places")

    def __init__(self) -> None:
        self._places, self._num_tokens = _Places(), 0

    def extend(self, text: Sequence[int]) -> None:
        # The place at the very end waits until something follows.
        self._places.add(text, self._num_tokens, 0)
        self._num_tokens = len(text)

    def find(self, ending: Sequence[int], text: Sequence[int], worth: float, endless: bool) -> Iterator[_Match]:
        for place in self._places.find(ending):
            if length := _common(text, place, ending):
                yield _Match(text, place, length, worth * 4.0**length, endless)


class _Answers:
    """What finished requests were answered; the least recently used are forgotten first.

    A place is ``number << 32 | index``, number being the answer's. Bounded by requests and by tokens.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.num_tokens = 0
        self._places = _Places()
        self._texts: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # least recently used first
        self._next = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: tuple[int, ...]) -> None:
        if not self.max_requests or len(text) > self.max_tokens:
            return
        self._next += 1
        self._texts[self._next] = text
        self._places.add(text, 0, self._next << 32)
        self.num_tokens += len(text)
        while len(self) > self.max_requests or self.num_tokens > self.max_tokens:
            number, oldest = self._texts.popitem(last=False)
            self._places.remove(oldest, number << 32)
            self.num_tokens -= len(oldest)

    def find(self, ending: Sequence[int]) -> Iterator[_Match]:
        longest, used = 0, 0
        for code in self._places.find(ending):
            number, place = code >> 32, code & 0xFFFF_FFFF
            text = self._texts[number]
            if length := _common(text, place, ending):
                if length > longest:
                    longest, used = length, number
                yield _Match(text, place, length, _FINISHED * 4.0**length)
        if used:
            self._texts.move_to_end(used)


@dataclass(slots=True)
class _State:
    own: _Text = field(default_factory=_Text)
    reference: _Text | None = None
    source: _Text | None = None


class SuffixDrafter(Drafter):
    Options = SuffixOptions
    trees = True

    def __init__(self, options: SuffixOptions | None = None, *, trees: bool = True):
        self.options = options or SuffixOptions()
        self.trees = trees and self.options.suffix_decoding_trees
        self.answers = _Answers(
            self.options.suffix_decoding_max_cached_requests, self.options.suffix_decoding_max_cached_tokens
        )
        self._states: dict[str, _State] = {}

    @classmethod
    def build(cls, options: Any, setting: Setting) -> "SuffixDrafter":
        return cls(options, trees=setting.trees)

    def describe(self) -> str:
        return f"matches of up to {self.options.suffix_decoding_max_tree_depth} tokens"

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def observe(self, steps: Sequence[Step], taps: object) -> None:
        for step in steps:  # so that the answers of requests for which others draft are remembered too
            self._states.setdefault(step.request.id, _State())

    def release(self, request: Request) -> None:
        if self._states.pop(request.id, None) and request.num_output:
            self.answers.add(tuple(request.tokens[max(0, request.num_prompt - _OPENING) :]))

    def _propose(self, request: Request, limit: int) -> Draft:
        matches = self._matches(request)
        if not matches:
            return EMPTY
        longest = max(match.length for match in matches)
        depth = min(limit, int(longest * self.options.suffix_decoding_max_spec_factor))
        return self._grow(matches, limit, depth, request.stop_ids)

    def _matches(self, request: Request) -> list[_Match]:
        state = self._states.setdefault(request.id, _State())
        tokens = request.tokens
        state.own.extend(tokens if not request.num_guessed else tokens[: request.num_settled])
        ending = tokens[-self.options.suffix_decoding_max_tree_depth :]
        matches = list(state.own.find(ending, tokens, _OWN, True))
        if request.reference:
            if state.reference is None:
                state.reference = _Text()
                state.reference.extend(request.reference)
            matches += state.reference.find(ending, request.reference, _REFERENCE, False)
        if request.source_ids:
            if state.source is None:
                state.source = _Text()
                state.source.extend(request.source_ids)
            matches += state.source.find(ending, request.source_ids, _OWN, False)
        if self.answers:
            matches += self.answers.find(ending)
        return matches

    def _grow(self, matches: Sequence[_Match], limit: int, max_depth: int, stop_ids: Set[int]) -> Draft:
        """The likeliest nodes first, until there are ``limit`` of them or the rest is too unlikely."""
        least = self.options.suffix_decoding_min_token_prob
        tokens: list[int] = []
        parents: list[int] = []
        # Smallest first: minus the chance, then a number that breaks ties; parent, path, and the places that agree.
        queue: list[tuple[float, int, int, tuple[int, ...], Sequence[_Match]]] = [(-1.0, 0, -1, (), matches)]
        chances: list[float] = []
        number, sureness = 0, 0
        while queue and len(tokens) < limit:
            chance, _, parent, path, group = heapq.heappop(queue)
            if path:
                if not tokens:
                    sureness = int(-10 * chance)  # of the first token, in tenths: what acceptance is counted by
                tokens.append(path[-1])
                parents.append(parent)
                chances.append(-chance)
                if len(path) >= max_depth or path[-1] in stop_ids:
                    continue
            node = len(tokens) - 1
            for token, share, agreeing in self._continuations(group, path):
                length = len(path) + max(match.length for match in agreeing)
                own = chance * share * length / (length + _DOUBT)
                if -own >= least:
                    number += 1
                    heapq.heappush(queue, (own, number, node, (*path, token), agreeing))
        return Draft(tuple(tokens), tuple(parents), None, sureness, tuple(chances)) if tokens else EMPTY

    def _continuations(
        self, matches: Sequence[_Match], path: Sequence[int]
    ) -> list[tuple[int, float, Sequence[_Match]]]:
        """What comes after a path at these places: tokens, their shares of the weight, and the places that agree."""
        groups: dict[int, list[_Match]] = {}
        for match in matches:
            place = match.place + len(path)
            if place < len(match.text):
                groups.setdefault(match.text[place], []).append(match)
            elif match.endless:
                groups.setdefault(path[place - len(match.text)], []).append(match)
        weighed = [(token, sum(match.weight for match in group), group) for token, group in groups.items()]
        total = sum(weight for _, weight, _ in weighed)
        if not self.trees and weighed:
            weighed = [max(weighed, key=lambda one: one[1])]
        return [(token, weight / total, group) for token, weight, group in weighed]


def _common(text: Sequence[int], place: int, ending: Sequence[int]) -> int:
    """How many tokens before this place are those our text ends in."""
    length, most = 0, min(place, len(ending))
    while length < most and text[place - 1 - length] == ending[-1 - length]:
        length += 1
    return length
