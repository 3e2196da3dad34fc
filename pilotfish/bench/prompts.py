"""Prompts to measure on: a JSONL file, or a handful of our own.

It does not know models. The one trick: `spread` takes the first prompt of every category, then every second one, so
any number of prompts, and any interrupted run, covers the categories evenly.

A line is {"turns": [first user message, ...]} or {"prompt": text, or a list}, with an optional "category". Of turns
only the first is used, for the later ones assume an answer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import OptionError, PromptError
from ..models.tokenizer import Tokenizer

UNNAMED = "uncategorised"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt. name: what messages call it. content: text, or token ids. chat: whether text is a user's message,
    which goes through the model's chat template if it has one."""

    name: str
    category: str
    content: str | tuple[int, ...]
    chat: bool = False

    def ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """The prompt as the model reads it. Raises PromptError for text without a tokenizer."""
        if not isinstance(self.content, str):
            return list(self.content)
        if tokenizer is None:
            raise PromptError(
                f"{self.name} is text and this model has no tokenizer: give prompts as lists of token ids"
            )
        if self.chat and tokenizer.hf.chat_template is not None:
            return tokenizer.chat([{"role": "user", "content": self.content}])
        return tokenizer.encode(self.content)


def read_prompts(path: str | Path | None = None, limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of a file, or our own if there is none; at most ``limit``, spread over the categories.

    Raises PromptError naming the line that is broken, OptionError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise OptionError(f"limit must be 1 or more, not {limit}")
    return spread(_samples() if path is None else _read_file(Path(path)), limit)


def spread(prompts: Sequence[BenchPrompt], limit: int | None = None) -> list[BenchPrompt]:
    """One prompt of each category in turn, until there are ``limit`` (None: all)."""
    columns: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        columns.setdefault(prompt.category, []).append(prompt)
    in_turn = [prompt for rank in zip_longest(*columns.values()) for prompt in rank if prompt is not None]
    return in_turn[:limit]


def _read_file(path: Path) -> list[BenchPrompt]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PromptError(f"prompts cannot be read from {path}: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                prompts.append(read_line(line, f"line {number}"))
        except PromptError as error:
            raise PromptError(f"{path}, {error}") from error.__cause__
    if not prompts:
        raise PromptError(f"{path} has no prompts: it must have a JSON object on each line")
    return prompts


def read_line(line: bytes, where: str) -> BenchPrompt:
    """One line of such a file. Raises PromptError, naming ``where``, for a broken one."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # bytes that are not UTF-8
        raise PromptError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: a JSON object is wanted, not {type(entry).__name__}")
    category = entry.get("category", UNNAMED)
    if not isinstance(category, str) or category in ("", "all"):
        raise PromptError(f"{where}: category must be a name other than 'all', not {category!r}")
    if ("turns" in entry) == ("prompt" in entry):
        raise PromptError(f"{where}: one of 'turns' and 'prompt' is wanted; the keys are {', '.join(sorted(entry))}")
    chat = "turns" in entry
    return BenchPrompt(where, category, _content(entry["turns" if chat else "prompt"], chat, where), chat)


def _content(value: Any, chat: bool, where: str) -> str | tuple[int, ...]:
    """A text, the first of several, or (for raw prompts) token ids."""
    if isinstance(value, list) and value and not chat and all(type(item) is int for item in value):
        return tuple(value)
    texts = [value] if isinstance(value, str) and not chat else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        wanted = "'turns' must be a list of texts" if chat else "'prompt' must be a text, or a list of texts or ids"
        raise PromptError(f"{where}: {wanted}, none of them empty")
    return str(texts[0])


def _samples() -> list[BenchPrompt]:
    return [
        BenchPrompt(f"sample {category} {n}", category, text, chat=True)
        for category, texts in _SAMPLES.items()
        for n, text in enumerate(texts, 1)
    ]


_FUNCTION = """def average_rating(reviews):
    total = 0
    count = 0
    for review in reviews:
        if review["rating"] is not None:
            total = total + review["rating"]
            count = count + 1
    return total / count"""

_LIGHTHOUSE = """The lighthouse at Cape Morrow was built in 1871, after two grain ships ran aground within a month.
For its first forty years it burned whale oil, then kerosene, and three keepers lived beside it with their families.
In 1912 the lamp was electrified and the crew was cut to one. The last keeper, Ada Finch, left in 1968, when a timer
took over her work. Today the tower is a museum run by volunteers. Last year it had nineteen thousand visitors, most
of them in July and August, and the money they brought paid for a new copper roof."""

_LIBRARY = """From October the town library will open on Sundays, from noon until five. The change follows a survey in
which six hundred readers took part; two thirds asked for longer hours, and most of them named Sunday. To pay for the
staff the library will close on Tuesday mornings, which are the quietest hours of the week. The children's room gets a
second reading hour on Sunday at three. The council will look at the numbers in spring and then decide whether the new
hours stay."""

# Ours, written for this file. Summaries and edits repeat their input, which drafters that copy like; maths does not.
_SAMPLES = {
    "coding": (
        "Write a Python function that merges two sorted lists into one sorted list without using sorted(). Add a "
        "docstring and two small tests.",
        "Write a Python class Stack with the methods push, pop, peek and is_empty. pop and peek raise IndexError on an "
        "empty stack.",
    ),
    "math": (
        "A baker fills 14 trays with 24 rolls each. She sells three quarters of the rolls in the morning and half of "
        "the rest in the afternoon. How many rolls are left? Explain step by step.",
        "A train leaves at 9:40 and arrives at 13:10, covering 280 kilometres. What is its average speed? Show how you "
        "get there.",
    ),
    "summary": (
        f"Summarise this text in three sentences.\n\n{_LIGHTHOUSE}",
        f"List the facts in this text as short bullet points.\n\n{_LIBRARY}",
    ),
    "qa": (
        "Why does the moon always show the same side to the earth?",
        "What is the difference between weather and climate? Give an example of each.",
    ),
    "edit": (
        f"Rename the variable count to num_rated in this function, and return 0 if there are none. Reply with the "
        f"whole function.\n\n{_FUNCTION}",
        f"Rewrite this text in the present tense and change nothing else.\n\n{_LIBRARY}",
    ),
}
