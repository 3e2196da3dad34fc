"""Drafts from counts: the unigram and bigram models of the paper's Table 3, made of the target's own text.

They do not know any model. The one trick: a bigram's law falls back on the unigram's by as much as its last token is
new, q(x | y) = (n(y x) + q(x)) / (n(y) + 1), so it is a law after any token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..decoding.draft import Draft
from ..decoding.request import Request
from ..drafters.base import Drafter
from ..drafters.drawing import Run


class Counts:
    """Of texts: how often each token came, and after which."""

    def __init__(self, texts: Iterable[Sequence[int]], num_ids: int):
        self.num_tokens = 0
        total_V = torch.zeros(num_ids, dtype=torch.float64)
        self.after: dict[int, Counter[int]] = {}
        for text in texts:
            self.num_tokens += len(text)
            total_V += torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=num_ids)
            for before, token in pairwise(text):
                self.after.setdefault(before, Counter())[token] += 1
        assert self.num_tokens > 0, "counts of nothing are no law"
        self.unigram_V = total_V / self.num_tokens

    def bigram(self, before: int) -> Tensor:
        """The law [V] of what follows a token, float64."""
        seen = self.after.get(before, Counter())
        law_V = self.unigram_V.clone()
        if seen:
            law_V[list(seen)] += torch.tensor(list(seen.values()), dtype=torch.float64)
        return law_V / (sum(seen.values()) + 1)


class CountDrafter(Drafter):
    """order: 1 for unigrams, 2 for bigrams."""

    def __init__(self, counts: Counts, order: int):
        assert order in (1, 2)
        self.counts, self.order = counts, order

    def law(self, before: int) -> Tensor:
        """q [V] after this token."""
        return self.counts.unigram_V if self.order == 1 else self.counts.bigram(before)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._propose(Run(request, limit)) for request, limit in zip(requests, limits, strict=True)]

    def _propose(self, run: Run) -> Draft:
        while not run.done:
            token = run.choose(self.law((run.request.tokens + run.tokens)[-1]).log())
            assert token is not None, "a law of counts has no NaN"
            run.tokens.append(token)
        return run.draft(len(self.counts.unigram_V), torch.device("cpu"))
