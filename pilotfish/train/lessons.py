"""Packs: several texts end to end, without padding, and which rows of them learn from which laws.

It does not know heads or losses. The one trick: a text's rows and laws are both counted from its prompt's last token,
so what a head guesses d tokens ahead is a shift by d, the same for every text:

    answer row a (from 0)   the state behind the prompt's last token (a = 0), the first answer token (a = 1), ...
    guess d of row a        is about law a + d, the one behind answer token a + d
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .states import Lesson
from .store import Text


@dataclass(frozen=True, slots=True)
class Laws:
    """See `Lesson`. texts_N: the draft id of the token that the text has there; -1 if the head cannot say it."""

    ids_NK: Tensor
    probs_NK: Tensor
    best_N: Tensor
    texts_N: Tensor

    def __len__(self) -> int:
        return len(self.best_N)

    def at(self, index: Tensor | slice) -> "Laws":
        return Laws(self.ids_NK[index], self.probs_NK[index], self.best_N[index], self.texts_N[index])


@dataclass(frozen=True, slots=True)
class Span:
    """One text in a pack: rows start..stop-1; the first that learns; and its laws first_law..last_law-1.
    first_answer: where its answer rows begin among all answer rows."""

    start: int
    stop: int
    first: int
    first_answer: int
    first_law: int
    num_laws: int


@dataclass(frozen=True, slots=True)
class Pack:
    """states_TD: float32. tokens: per text all ids. answers_A: the rows that learn, all texts'."""

    spans: list[Span]
    tokens: list[Tensor]
    states_TD: Tensor
    laws: Laws
    answers_A: Tensor

    def following(self, distance: int, answers_only: bool) -> Tensor:
        """The token so many places after each row's own, [T] or [A]. Beyond a text's end: its last one."""
        parts = []
        for span, tokens in zip(self.spans, self.tokens, strict=True):
            first = span.first if answers_only else span.start
            places = torch.arange(first - span.start, span.stop - span.start, device=tokens.device) + distance
            parts.append(tokens[places.clamp(max=len(tokens) - 1)])
        return torch.cat(parts)

    def positions(self, answers_only: bool) -> Tensor:
        """Each row's place in its text, [T] or [A]."""
        firsts = [(span.first if answers_only else span.start, span) for span in self.spans]
        device = self.states_TD.device
        return torch.cat([torch.arange(first - span.start, span.stop - span.start, device=device)
                          for first, span in firsts])  # fmt: skip

    def pairs(self, distance: int) -> tuple[Tensor, Tensor]:
        """(answer rows, laws): which rows have a guess so far ahead, and what it is about."""
        rows, laws = [], []
        for span in self.spans:
            count = min(span.stop - span.first, span.num_laws - distance)
            if count > 0:
                rows.append(torch.arange(span.first_answer, span.first_answer + count))
                laws.append(torch.arange(span.first_law + distance, span.first_law + distance + count))
        if not rows:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        device = self.states_TD.device
        return torch.cat(rows).to(device), torch.cat(laws).to(device)


def pack(lessons: Sequence[Lesson], draft_of_V: Tensor, device: torch.device) -> Pack:
    """Lay lessons end to end on a device. draft_of_V: the draft id of each of the target's, or -1."""
    spans: list[Span] = []
    tokens: list[Tensor] = []
    texts: list[Tensor] = []
    answers: list[Tensor] = []
    row = answer = law = 0
    draft_of_V = draft_of_V.cpu()
    for lesson in lessons:
        own, num_laws = torch.tensor(lesson.text.ids), len(lesson.best_N)
        stop, first = row + len(lesson.states_MD), row + lesson.text.num_prompt - 1
        spans.append(Span(row, stop, first, answer, law, num_laws))
        answers.append(torch.arange(first, stop))
        tokens.append(own.to(device))
        texts.append(draft_of_V[own[lesson.text.num_prompt + 1 :]])
        row, answer, law = stop, answer + stop - first, law + num_laws
    laws = Laws(
        torch.cat([lesson.ids_NK for lesson in lessons]).long().to(device),
        torch.cat([lesson.probs_NK for lesson in lessons]).float().to(device),
        torch.cat([lesson.best_N for lesson in lessons]).long().to(device),
        torch.cat(texts).to(device),
    )
    states_TD = torch.cat([lesson.states_MD for lesson in lessons]).to(device).float()
    return Pack(spans, tokens, states_TD, laws, torch.cat(answers).to(device))


def plan(texts: Sequence[Text], num_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The packs of an epoch: indices of texts, shuffled, so many tokens each. A function of its arguments alone."""
    order = list(range(len(texts)))
    random.Random(f"{seed}/{epoch}/order").shuffle(order)
    packs: list[list[int]] = []
    room = 0
    for index in order:
        length = len(texts[index].ids)
        if not packs or length > room:
            packs.append([])
            room = num_tokens
        packs[-1].append(index)
        room -= length
    return packs


def padded(x: Tensor, multiple: int = 256) -> Tensor:
    """With rows of zeros up to a multiple. A CPU's library keeps a plan, with memory of its own (up to 30 MB),
    for every shape of a bfloat16 product; rows that come in a few sizes only keep it small."""
    missing = -len(x) % multiple
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def chunks(num_rows: int, size: int) -> Iterator[slice]:
    """0..num_rows-1 in parts."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
