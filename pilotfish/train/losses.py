"""Losses: how far a head's guess is from the target's law. Pure functions of logits and laws.

They do not know heads. The one trick: a law is its likeliest tokens, so a loss reads a few dozen logits of a row, and
the only work over the whole draft vocabulary is one logsumexp.

    kl       -sum p log q, p the target's likeliest tokens made a law of the draft vocabulary: what most trainers use
    ce       -log q of the token that the text has; rows whose token the head cannot say teach nothing
    tv       1 - sum min(p, q): the share of drawn guesses that would be rejected (Leviathan et al., 2023, section 3.3)
    hybrid   lambda kl + (1 - lambda) tv with lambda = exp(-3 acceptance): far away kl has the better gradient, close by
             tv is what counts (2602.23881)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .lessons import Laws
from .options import Loss


@dataclass(slots=True)
class Tally:
    """Sums by position (guess 0 is the one right behind the pending token).

    rows: guesses. hits: those that are the target's likeliest token. overlap: sum of min(p, q). loss: of the losses.
    """

    rows: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def add(self, position: int, rows: int, hits: float, overlap: float, loss: float) -> None:
        for name, value in (("rows", rows), ("hits", hits), ("overlap", overlap), ("loss", loss)):
            sums: list[float] = getattr(self, name)
            sums += [0.0] * (position + 1 - len(sums))
            sums[position] += value

    def merge(self, other: "Tally") -> None:
        for position in range(len(other.rows)):
            self.add(position, int(other.rows[position]), other.hits[position], other.overlap[position],
                     other.loss[position])  # fmt: skip

    def mean(self, name: str) -> list[float]:
        """hits, overlap or loss per guess, by position; hits: acceptance at temperature 0, overlap: at 1."""
        return [value / rows if rows else 0.0 for value, rows in zip(getattr(self, name), self.rows, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """Tokens a pass at temperature 0, if guesses of one text were accepted independently of each other."""
        total, alive = 1.0, 1.0
        for share in self.mean("hits"):
            alive *= share
            total += alive
        return total


def judge(logits_NV: Tensor, laws: Laws, kind: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """(losses [N], hits [N] bool, overlaps [N]) of a head's logits; gradients flow through the losses alone."""
    logits_NV = logits_NV.float()
    total_N1 = logits_NV.logsumexp(1, keepdim=True)
    logq_NK = logits_NV.gather(1, laws.ids_NK) - total_N1
    overlap_N = torch.minimum(laws.probs_NK, logq_NK.exp()).sum(1)
    if kind == "ce":
        known_N = laws.texts_N >= 0
        logq_N = (logits_NV.gather(1, laws.texts_N.clamp(min=0)[:, None]) - total_N1)[:, 0]
        losses_N = torch.where(known_N, -logq_N, 0.0)
    elif kind == "tv":
        losses_N = 1 - overlap_N
    else:
        p_NK = laws.probs_NK / laws.probs_NK.sum(1, keepdim=True).clamp(min=1e-6)
        losses_N = -(p_NK * logq_NK).sum(1)
        if kind == "hybrid":
            share_N = torch.exp(-3 * overlap_N.detach())
            losses_N = share_N * losses_N + (1 - share_N) * (1 - overlap_N)
    with torch.no_grad():
        best_N = logits_NV.gather(1, laws.best_N.clamp(min=0)[:, None])[:, 0]
        hits_N = (laws.best_N >= 0) & (best_N >= logits_NV.amax(1))
    return losses_N, hits_N, overlap_N.detach()
