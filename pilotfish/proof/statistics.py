"""Pearson's chi-square for counts against known laws, over many conditions at once.

It does not know tokens, models or drafts: a stratum is a condition with a law of its own, a cell is an outcome. The
one trick: given its stratum a draw is independent of every other, so the strata's statistics and degrees of freedom
simply add up, and a condition that was met only five times does no harm: its cells are pooled away.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

LEAST_EXPECTED = 5.0  # Cochran's rule; cells below it are pooled within their stratum


@dataclass(frozen=True, slots=True)
class Fit:
    """How well counts fit. p_value: chance that a correct system fits no better; 1 if nothing could be tested."""

    chi_square: float
    num_degrees: int
    num_draws: int

    @property
    def p_value(self) -> float:
        return upper_tail(self.chi_square, self.num_degrees) if self.num_degrees else 1.0


@dataclass(slots=True)
class Tally:
    """Counts of outcomes by condition, with the law of each condition."""

    laws: dict[Hashable, Mapping[Any, float]] = field(default_factory=dict)
    counts: dict[Hashable, Counter[Hashable]] = field(default_factory=dict)

    def add(self, stratum: Hashable, law: Mapping[Any, float], outcome: Hashable) -> None:
        """One draw. law: probabilities of all outcomes, summing to 1; the first one given for a stratum counts."""
        if stratum not in self.laws:
            self.laws[stratum], self.counts[stratum] = law, Counter()
        self.counts[stratum][outcome] += 1

    def fit(self) -> Fit:
        """Chi-square and degrees of freedom, summed over the strata. An outcome of probability 0 makes it infinite."""
        chi_square, num_degrees, num_draws = 0.0, 0, 0
        for stratum, counts in self.counts.items():
            own, degrees = _one_stratum(counts, self.laws[stratum])
            chi_square, num_degrees, num_draws = chi_square + own, num_degrees + degrees, num_draws + counts.total()
        if math.isinf(chi_square):
            num_degrees = max(1, num_degrees)
        return Fit(chi_square, num_degrees, num_draws)


def upper_tail(chi_square: float, num_degrees: int) -> float:
    """P(X >= chi_square) for a chi-square variable: the regularised upper incomplete gamma function."""
    if math.isinf(chi_square):
        return 0.0
    half = torch.tensor([num_degrees / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _one_stratum(counts: Counter[Hashable], law: Mapping[Any, float]) -> tuple[float, int]:
    if any(law.get(outcome, 0.0) <= 0 for outcome in counts):
        return math.inf, 0
    total = counts.total()
    cells = _pool([(total * probability, counts[outcome]) for outcome, probability in law.items() if probability > 0])
    return sum((seen - expected) ** 2 / expected for expected, seen in cells), len(cells) - 1


def _pool(cells: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Merge the rarest cells until each expects enough. Which ones depends on the law alone, never on the counts."""
    pooled: list[tuple[float, int]] = []
    expected, seen = 0.0, 0
    for own_expected, own_seen in sorted(cells, key=lambda cell: cell[0]):
        expected, seen = expected + own_expected, seen + own_seen
        if expected >= LEAST_EXPECTED:
            pooled.append((expected, seen))
            expected, seen = 0.0, 0
    if expected or seen or not pooled:  # the likeliest come last, so only a stratum with few draws ends here
        last = pooled.pop() if pooled else (0.0, 0)
        pooled.append((last[0] + expected, last[1] + seen))
    return pooled
