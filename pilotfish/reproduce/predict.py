"""Predictions beside what was measured, and what lies between them, factor by factor.

Plain numbers in, plain numbers out. The one trick: the way from the paper's formula to the measured speed is a product
of three ratios, each measured by itself, so that nothing is left to be guessed:

    measured     tokens a pass      K c + 1        what is left: the engine's own time,
    -------- =   -------------  x   -------   x    averages over prompts, the machine
    formula      E(alpha, K)        cost a pass

The formula takes a pass over K + 1 rows to cost what one row costs, and acceptance to be the same at every place,
independently. On a CPU neither is so: more rows take longer, and what is easy to guess comes in runs.
"""

from dataclasses import dataclass

from ..decoding.theory import expected_tokens, walltime_factor

_SMALL = 0.03  # deviations that need no words
AGREE = 0.15


@dataclass(frozen=True, slots=True)
class Prediction:
    """One drafter at one K. alpha: on the target's text. c: of a drafted token, rows: of K + 1 rows, both in plain
    passes. tokens: a pass, as measured; cost: of a pass and its drafting, as measured. tokens_of_runs: a pass, by the
    chances of runs on the target's text, if they are known. measured: the speed-up."""

    num_drafted: int
    alpha: float
    c: float
    rows: float
    tokens: float
    cost: float
    measured: float
    tokens_of_runs: float | None = None

    @property
    def formula(self) -> float:
        """The paper's, Theorem 3.8."""
        return walltime_factor(self.alpha, self.num_drafted, self.c)

    @property
    def with_rows(self) -> float:
        """The same with what K + 1 rows cost here."""
        return walltime_factor(self.alpha, self.num_drafted, self.c, self.rows)

    @property
    def with_runs(self) -> float:
        """And with acceptance that comes in runs."""
        tokens = self.tokens_of_runs or expected_tokens(self.alpha, self.num_drafted)
        return tokens / (self.num_drafted * self.c + self.rows)

    @property
    def factors(self) -> tuple[float, float, float]:
        """Of acceptance, of costs, of the rest: their product is measured over formula."""
        of_tokens = self.tokens / expected_tokens(self.alpha, self.num_drafted)
        of_cost = (self.num_drafted * self.c + 1) / self.cost
        return of_tokens, of_cost, self.measured / (self.tokens / self.cost)

    @property
    def off(self) -> float:
        """Measured over our prediction, less 1."""
        return self.measured / self.with_runs - 1

    @property
    def counts(self) -> bool:
        """Whether both are above 1, where they should agree."""
        return self.measured > 1 and self.with_runs > 1

    def explain(self) -> str:
        """What the formula misses, the largest first."""
        of_tokens, of_cost, rest = self.factors
        expected = expected_tokens(self.alpha, self.num_drafted)
        words = [
            (of_tokens, f"{self.tokens:.2f} tokens a pass where independent places would give {expected:.2f}"),
            (
                of_cost,
                f"a pass with its drafting costs {self.cost:.2f} of a plain one where the formula has "
                f"{self.num_drafted * self.c + 1:.2f}, for {self.num_drafted + 1} rows cost {self.rows:.2f}",
            ),
            (rest, "the engine's own time and averages"),
        ]
        told = [f"{text} (x {factor:.2f})" for factor, text in sorted(words, key=lambda one: -abs(one[0] - 1))
                if abs(factor - 1) > _SMALL]  # fmt: skip
        return "; ".join(told) or "nothing of note"
