"""How a drafter with logits chooses: one request's drafting in progress, token by token.

It does not know where the logits come from (a draft model, a part of the target). The one trick: a run chooses along
a row of guesses, each row's token exactly as if it were the only one asked for; so whoever guesses well saves passes,
and nobody can change what is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..decoding.draft import EMPTY, Draft, chain
from ..decoding.noise import SeededNoise
from ..decoding.request import Request
from ..decoding.sampling import Likeliest, likeliest, process, warp
from ..lazily import functional as F
from ..lazily import np, torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Run:
    """One request's drafting in progress.

    probabilistic: without a seed and above temperature 0, draw from q and keep it; otherwise take q's likeliest.
    tokens: chosen so far, at most ``limit``. laws: what they were drawn from, if they were drawn.
    """

    request: Request
    limit: int
    probabilistic: bool = True
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return self.limit - len(self.tokens)

    @property
    def done(self) -> bool:
        # After the end of text nothing can follow: stopping there looks at the drawn token, but at none that counts.
        return self.num_left <= 0 or (bool(self.tokens) and self.tokens[-1] in self.request.stop_ids)

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn from a law that is kept, not chosen."""
        return self.probabilistic and not self.request.params.greedy and self.request.rule != "coupled"

    def choose(self, logits_V: Tensor) -> int | None:
        """The next token, by the same warping as the target's. None if the law to draw from is broken (NaN): then the
        draft ends there, and what was drawn before stays. To drop it because of what follows it would be a bias."""
        request = self.request
        context = (request.params, request.prompt, [request.output + self.tokens], request.stop_ids)
        if request.params.greedy:
            return likeliest(process(logits_V[None], *context))[0][0]
        q_V = warp(logits_V[None], *context)[0]
        # Positions count from the settled text: a drafter's drafter meets the coins that decide what it guesses.
        noise, depth = SeededNoise(request.seed, request.num_settled), request.num_guessed + len(self.tokens)
        if self.drawn:
            if math.isnan(likeliest(q_V[None])[1][0]):
                return None
            self.laws.append(q_V)
            return noise.draw(depth, q_V)
        return noise.race(depth, q_V) if request.rule == "coupled" else likeliest(q_V[None])[0][0]

    def draft(self, num_ids: int, device: torch.device) -> Draft:
        """What was chosen, its laws over the target's ``num_ids`` ids."""
        if not self.drawn or not self.tokens:
            return chain(self.tokens) if self.tokens else EMPTY
        q_NV = stacked(self.laws).to(device)
        return chain(self.tokens, F.pad(q_NV, (0, num_ids - q_NV.shape[1])) if q_NV.shape[1] < num_ids else q_NV)


def stacked(laws: Sequence[Tensor]) -> Tensor:
    """[V] each, as [N, V]. On a CPU by numpy, on one thread: see `pilotfish.decoding.sampling`."""
    if laws[0].device.type == "cpu":
        return torch.from_numpy(np.stack([q_V.numpy() for q_V in laws]))
    return torch.stack(list(laws))


@dataclass(frozen=True, slots=True)
class Reduced:
    """A head of fewer rows than the target has ids. ids_M: which one each of its logits is for, ascending."""

    ids_M: Tensor
    num_ids: int

    def widened(self, logits_M: Tensor) -> Tensor:
        """Over the target's ids, [V]. Those that have no row cannot be said: whatever is done to logits before the
        softmax leaves them at minus infinity, and q is 0 there."""
        return logits_M.new_full((self.num_ids,), -math.inf).index_copy_(0, self.ids_M, logits_M)

    def id_of(self, place: int) -> int:
        return int(self.ids_M[place])


def extend(
    runs: Sequence[Run],
    guesses: Sequence[Sequence[int]],
    logits_NV: Tensor,
    reduced: Reduced | None = None,
    best: Likeliest | None = None,
) -> None:
    """Let each run choose, and go on choosing as long as it chooses what was guessed.

    logits_NV: per run ``len(guess) + 1`` rows, those after its last token and after each guess. A run adds one token
    more than it met right guesses, unless it is done before. reduced: what the logits are for, if not for the first V
    ids. best: `likeliest` of the logits, if it is known.
    """
    greedy = [run.request.params.greedy and not run.request.params.processed for run in runs]
    choices = (best or likeliest(logits_NV))[0] if any(greedy) else []
    start = 0
    for run, guess, plain in zip(runs, guesses, greedy, strict=True):
        for row, guessed in enumerate((*guess, None), start):
            if plain:
                token: int | None = choices[row] if reduced is None else reduced.id_of(choices[row])
            else:
                token = run.choose(logits_NV[row] if reduced is None else reduced.widened(logits_NV[row]))
            if token is None:
                run.limit = len(run.tokens)
                break
            run.tokens.append(token)
            if run.done or run.tokens[-1] != guessed:
                break
        start += len(guess) + 1
    assert start == len(logits_NV), "one row per last token and guess"
