"""Prompts that cover what people ask, without a data set: the target writes them itself.

It does not know engines. The one trick: a recipe is a generator that *asks* for text (it yields what is to be gone on
with, and is sent how it went on) and returns the finished prompt; so a recipe reads like what it does, and the
collector may run hundreds of them at once.

An instruction model that is given its own chat format up to where the user speaks, and perhaps the user's first words,
goes on as a user would. What the target wrote, and text found in a folder (`seed_text`), is kept as passages, which
later prompts ask to summarise, translate, edit and answer from. Every prompt is drawn from (seed, its number) and the
passages there are.
"""

import random
import re
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import OptionError
from ..models.tokenizer import Tokenizer
from . import phrases

_MARK = "\u2603"
_POOL = 400  # passages and talks that are remembered
_SEED_BYTES = 32 << 20
_SEED_SUFFIXES = {"", ".txt", ".md", ".rst", ".text", ".py", ".tex", ".org", ".html", ".htm"}
_WORD = re.compile(r"[A-Za-z][a-z]{3,}")
_TAG = re.compile(r"<[^<>]{1,200}>")
_WRITING = 0.9  # temperature of what users say: enough to differ, little enough to make sense


@dataclass(frozen=True, slots=True)
class Ask:
    """Text for the target to go on with. num_tokens: at most."""

    ids: list[int]
    num_tokens: int
    temperature: float = _WRITING


@dataclass(frozen=True, slots=True)
class Prompt:
    """A finished prompt. num_tokens: of the answer, at most. message: what the user says, for follow-ups."""

    ids: list[int]
    kind: str
    num_tokens: int
    message: str = ""


Recipe = Generator[Ask, str, Prompt | None]


@dataclass(slots=True)
class Material:
    """Passages by language, and talks to go on with. The newest replace the oldest."""

    passages: dict[str, deque[str]] = field(default_factory=dict)
    seeds: dict[str, list[str]] = field(default_factory=dict)
    talks: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_POOL))

    def keep(self, kind: str, message: str, answer: str) -> None:
        """What an answer gives later prompts."""
        answer = answer.strip()
        if not reads_well(answer):
            return
        language = language_of(answer)
        if kind == "passage" and language is not None and len(answer) > 200:
            self.passages.setdefault(language, deque(maxlen=_POOL)).append(answer)
        if message and len(message) + len(answer) < 1500:
            self.talks.append((message, answer))

    def languages(self) -> list[str]:
        return sorted(name for name in {*self.passages, *self.seeds} if self.passages.get(name) or self.seeds.get(name))

    def passage(self, rng: random.Random, language: str | None = None) -> str | None:
        """One of these, or None."""
        known = self.languages() if language is None else [language]
        pool: list[str] = []
        name = (
            "en" if language is None and "en" in known and rng.random() < 0.8 else (rng.choice(known) if known else "")
        )
        for source in (self.passages, self.seeds):
            pool = list(source.get(name, ()))
            if pool and rng.random() < 0.5:
                break
        pool = pool or list(self.passages.get(name, ())) or self.seeds.get(name, [])
        return rng.choice(pool) if pool else None


class Prompts:
    """Makes recipes. tokenizer: None for a model of bare ids, whose prompts are then random ids."""

    def __init__(self, tokenizer: Tokenizer | None, num_ids: int, max_length: int, seed: int, material: Material):
        self.tokenizer, self.num_ids, self.max_length, self.seed = tokenizer, num_ids, max_length, seed
        self.material = material
        self._chats = tokenizer is not None and tokenizer.hf.chat_template is not None
        self._vocabulary = [] if tokenizer is None else sorted(tokenizer.spelt)

    def recipe(self, number: int) -> tuple[Recipe, random.Random]:
        """The recipe of this number, and the generator of chances that belongs to it."""
        rng = random.Random(f"{self.seed}/{number}")
        if self.tokenizer is None:
            return self._bare(rng), rng
        kinds = _CHAT if self._chats else _PLAIN
        if not self.material.languages():
            kinds = {kind: weight for kind, weight in kinds.items() if kind not in _NEED_PASSAGES}
        make = rng.choices(list(kinds), list(kinds.values()))[0]
        return make(self, rng), rng

    # -- pieces --------------------------------------------------------------------------------------------------

    def answer_to(
        self, message: str, kind: str, num_tokens: int, before: Sequence[tuple[str, str]] = ()
    ) -> Prompt | None:
        """The prompt of a user's message; None if it is nothing or too long."""
        message = message.strip()
        if len(message) < 4:
            return None
        ids = self._chat([*before, (message, None)])
        if len(ids) > self.max_length - 32:
            return None
        return Prompt(ids, kind, min(num_tokens, self.max_length - len(ids)), message)

    def says(self, opening: str, num_tokens: int = 48, before: Sequence[tuple[str, str]] = ()) -> Ask:
        """A user's message that begins like this, for the target to go on with."""
        ids = self._chat([*before, (_MARK, None)])
        text = self._text(ids)
        head = text[: text.rindex(_MARK)] if _MARK in text else ""
        assert self.tokenizer is not None
        return Ask(self.tokenizer.encode(head + opening, add_special_tokens=not self._chats), num_tokens)

    def _chat(self, turns: Sequence[tuple[str, str | None]]) -> list[int]:
        assert self.tokenizer is not None
        if not self._chats:  # a base model goes on with text
            text = "\n\n".join(part for turn in turns for part in turn if part)
            return self.tokenizer.encode(text)
        messages: list[dict[str, str]] = []
        for message, answer in turns:
            messages.append({"role": "user", "content": message})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return self.tokenizer.chat(messages)

    def _text(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def topic(self, rng: random.Random) -> str:
        """A word, drawn from the target's vocabulary: as broad as what it was trained on."""
        assert self.tokenizer is not None
        for _ in range(100):
            word = self.tokenizer.text([rng.choice(self._vocabulary)]).strip()
            if _WORD.fullmatch(word):
                return word
        return "water"

    def opening(self, rng: random.Random) -> str:
        language = "en" if rng.random() < 0.75 else rng.choice(list(phrases.OPENINGS))
        return rng.choice(phrases.OPENINGS[language])

    def excerpt(self, rng: random.Random, most: int, language: str | None = None) -> str | None:
        """A passage of at most so many characters, cut at a sentence."""
        text = self.material.passage(rng, language)
        if text is None or len(text) <= most:
            return text
        cut = max(text.rfind(end, 0, most) for end in (". ", ".\n", "? ", "\n"))
        return text[: cut + 1] if cut > most // 3 else text[:most]

    # -- recipes -------------------------------------------------------------------------------------------------

    def _bare(self, rng: random.Random) -> Recipe:
        yield from ()
        return Prompt([rng.randrange(self.num_ids) for _ in range(rng.randint(1, 4))], "ids", self.max_length // 2)

    def _began(self, rng: random.Random, kind: str, openings: Sequence[str], num_tokens: int) -> Recipe:
        """The target as a user, from a few first words on; for some prompts with a topic."""
        opening = rng.choice(openings)
        if rng.random() < 0.25 and opening[-1] not in ":\n(":
            opening += f" {self.topic(rng)}"
        wrote = yield self.says(opening)
        return self.answer_to(opening + first_part(wrote, code=opening.endswith("\n")), kind, num_tokens)

    def _question(self, rng: random.Random) -> Recipe:
        return self._began(rng, "question", [self.opening(rng)], 224)

    def _fact(self, rng: random.Random) -> Recipe:
        return self._began(rng, "fact", phrases.FACTS, 96)

    def _task(self, rng: random.Random) -> Recipe:
        return self._began(rng, "task", phrases.TASKS, 256)

    def _code(self, rng: random.Random) -> Recipe:
        return self._began(rng, "code", phrases.CODE, 256)

    def _science(self, rng: random.Random) -> Recipe:
        return self._began(rng, "science", phrases.SCIENCE, 224)

    def _free(self, rng: random.Random) -> Recipe:
        wrote = yield self.says("", 64)
        return self.answer_to(first_part(wrote), "free", 224)

    def _maths(self, rng: random.Random) -> Recipe:
        things = f"{rng.randint(2, 60)} {self.topic(rng)}s" if rng.random() < 0.3 else str(rng.randint(2, 250))
        opening = f"{rng.choice(phrases.NAMES)} {rng.choice(phrases.DEEDS)} {things}"
        wrote = yield self.says(opening, 72)
        problem = opening + first_part(wrote)
        problem = problem[: problem.index("?") + 1] if "?" in problem else f"{problem} {rng.choice(phrases.ASKS)}"
        if rng.random() < 0.3:
            problem += " Explain step by step."
        return self.answer_to(problem, "maths", 224)

    def _passage(self, rng: random.Random) -> Recipe:
        yield from ()
        message = f"Write {rng.choice(phrases.FORMS)} about {self.topic(rng)}"
        message += f" and {self.topic(rng)}." if rng.random() < 0.5 else "."
        if rng.random() < 0.25:
            message += f" Write in {rng.choice(list(phrases.LANGUAGES.values()))}."
        return self.answer_to(message, "passage", 384)

    def _summary(self, rng: random.Random) -> Recipe:
        yield from ()
        text = self.excerpt(rng, rng.choice((800, 1600, 2600)))
        return self.answer_to(rng.choice(phrases.SUMMARISE).format(text=text), "summary", 192)

    def _edit(self, rng: random.Random) -> Recipe:
        yield from ()
        text = self.excerpt(rng, rng.choice((300, 700, 1200)))
        return self.answer_to(rng.choice(phrases.EDIT).format(text=text), "edit", 256)

    def _translate(self, rng: random.Random) -> Recipe:
        """Half of the sources are foreign; where there is none, the target is asked for some first."""
        away = rng.choice(["de", "de", "de", "fr", "es", "it", "pt"])
        source, target = (away, "en") if rng.random() < 0.7 else ("en", away)
        text = self.excerpt(rng, rng.choice((120, 240, 400)), source)
        if text is None:
            message = f"Write two sentences in {phrases.LANGUAGES[source]} about {self.topic(rng)}."
            wrote = yield Ask(self._chat([(message, None)]), 64)
            text = first_part(wrote)
        names = {"source": phrases.LANGUAGES[source], "target": phrases.LANGUAGES[target]}
        return self.answer_to(rng.choice(phrases.TRANSLATE).format(text=text, **names), "translate", 128)

    def _reading(self, rng: random.Random, number: int = 1) -> Recipe:
        texts = [self.excerpt(rng, 1500 if number == 1 else 500) for _ in range(number)]
        text = "\n\n".join(f"[{i}] {one}" if number > 1 else str(one) for i, one in enumerate(texts, 1))
        opening = rng.choice(phrases.FACTS)
        ask = self.says(f"{texts[-1]}\n\n{opening}", 32)
        if len(ask.ids) > self.max_length - 64:
            return None
        question = opening + first_part((yield ask))
        form = rng.choice(phrases.READ if number == 1 else phrases.RETRIEVE)
        return self.answer_to(form.format(text=text, question=question), "reading" if number == 1 else "retrieval", 128)

    def _retrieval(self, rng: random.Random) -> Recipe:
        return self._reading(rng, rng.randint(3, 5))

    def _long(self, rng: random.Random) -> Recipe:
        """As much text as fits with an answer behind it."""
        yield from ()
        assert self.tokenizer is not None
        parts: list[str] = []
        room = self.max_length - 300 - len(self._chat([(_MARK, None)]))
        while room > 50 and len(parts) < 40:
            text = str(self.excerpt(rng, 3000))
            count = len(self.tokenizer.encode(text, add_special_tokens=False)) + 2
            parts.append(text if count <= room else text[: len(text) * room // count])
            room -= count
        if not parts:
            return None
        form = rng.choice((*phrases.SUMMARISE, *phrases.EDIT[-1:]))
        return self.answer_to(form.format(text="\n\n".join(parts)), "long", 224)

    def _follow_up(self, rng: random.Random) -> Recipe:
        if not self.material.talks:
            return (yield from self._free(rng))
        before = [rng.choice(self.material.talks) for _ in range(rng.choice((1, 1, 1, 2)))]
        opening = rng.choice(("", "", "Now", "Can you", "And", "Rewrite", "Why", "What about", self.opening(rng)))
        ask = self.says(opening, 40, before)
        if len(ask.ids) > self.max_length - 128:
            return None
        wrote = yield ask
        return self.answer_to(opening + first_part(wrote), "follow_up", 224, before)

    def _continuation(self, rng: random.Random) -> Recipe:
        """For base models: text to go on with."""
        yield from ()
        text = (
            self.excerpt(rng, rng.choice((60, 200, 600))) if self.material.languages() and rng.random() < 0.7 else None
        )
        if text is None:
            text = rng.choice((f"The {self.topic(rng)}", f"{self.topic(rng)} and {self.topic(rng)}", self.opening(rng)))
        return self.answer_to(text, "passage", 384)


_CHAT: dict[Callable[[Prompts, random.Random], Recipe], float] = {
    Prompts._question: 14,
    Prompts._fact: 10,
    Prompts._task: 11,
    Prompts._code: 6,
    Prompts._science: 5,
    Prompts._free: 6,
    Prompts._maths: 12,
    Prompts._passage: 7,
    Prompts._summary: 10,
    Prompts._edit: 6,
    Prompts._translate: 8,
    Prompts._reading: 5,
    Prompts._retrieval: 6,
    Prompts._long: 3,
    Prompts._follow_up: 6,
}
_PLAIN: dict[Callable[[Prompts, random.Random], Recipe], float] = {
    Prompts._continuation: 60,
    Prompts._question: 10,
    Prompts._code: 6,
    Prompts._maths: 6,
    Prompts._summary: 6,
    Prompts._translate: 6,
    Prompts._reading: 6,
}
_NEED_PASSAGES = {Prompts._summary, Prompts._edit, Prompts._reading, Prompts._retrieval, Prompts._long}


def first_part(text: str, code: bool = False) -> str:
    """What a user says in one go: up to the first empty line. code: may have some."""
    text = text.rstrip()
    return text if code else text.split("\n\n")[0]


def reads_well(text: str) -> bool:
    """Whether a text says something: it is not empty, and does not go in circles (then it would compress well)."""
    data = text.encode()
    return len(data) > 20 and len(data) < 3.2 * len(zlib.compress(data))


def language_of(text: str) -> str | None:
    """The language whose marks are most frequent; None if there are hardly any."""
    words = re.findall(r"\w+", text.lower())
    counts = {name: sum(words.count(mark) for mark in marks) for name, marks in phrases.MARKS.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] >= max(2, len(words) // 30) else None


def read_seeds(folder: str) -> tuple[dict[str, list[str]], int]:
    """Paragraphs of plain text under a folder, by language, and how many files could not be used.

    The first 32 MB, in the order of the names. Raises OptionError if there is nothing.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise OptionError(f"seed_text: there is no folder {root}")
    found: dict[str, list[str]] = {}
    skipped, left = 0, _SEED_BYTES
    for path in sorted(root.rglob("*")):
        if left <= 0:
            break
        if not path.is_file() or path.suffix.lower() not in _SEED_SUFFIXES:
            continue
        try:
            data = path.read_bytes()[:left]
            text = data.decode("utf-8", errors="strict" if len(data) < left else "ignore")
        except (OSError, UnicodeDecodeError):
            skipped += 1
            continue
        left -= len(data)
        for paragraph in paragraphs(text):
            language = language_of(paragraph)
            if language is not None:
                found.setdefault(language, []).append(paragraph)
    if not found:
        raise OptionError(f"seed_text: {root} has no readable text (paragraphs of 200 to 3000 characters)")
    return found, skipped


def paragraphs(text: str) -> Iterable[str]:
    """Parts that read like prose, neighbours joined where they are short."""
    parts: list[str] = []
    for block in re.split(r"\n\s*\n", _TAG.sub(" ", text)):
        block = " ".join(block.split())
        letters = sum(c.isalpha() or c == " " for c in block)
        if len(block) < 60 or letters < 0.85 * len(block):
            continue
        parts.append(block)
        if sum(map(len, parts)) > 1000:
            yield "\n\n".join(parts)[:3000]
            parts = []
    rest = "\n\n".join(parts)
    if len(rest) >= 200:
        yield rest[:3000]
