"""A group of weights as 16 levels: numbers 0 to 15, a scale and a minimum, weight = scale x number + minimum.

It does not know layers or bytes. The one trick: whatever the idea behind them, scales and minimums are only offered,
and the ones with the least squared error stay. So weights that somebody else has already rounded to 16 levels (GGUF's
Q4_0 and Q4_1) come back exactly: among the offers are those in which a group's values are whole steps apart.

Scales and minimums are float16, as they are stored, before their error is measured.
"""

import torch
from torch import Tensor

TOP = 15  # the largest number
LARGEST = 65504.0  # that a float16 holds
_STEPS = (15, 14, 16, 17)  # between a group's extremes; more than 15 clip a few weights and serve the others better
_REFITS = 4
_GROUPS_AT_ONCE = 8192
_OFF = 0.1  # steps that a weight may lie beside a level for the group to look rounded already
_FEW = 8  # weights that tell most groups apart from rounded ones


def fit(weights_GK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [G, K] uint8, scales [G] and minimums [G] float16 for G groups of finite float32 weights.

    Nothing may exceed LARGEST. A weight's error is at most about half a step, and never less than float16's own:
    2^-12 of the minimum, and 3e-8 near zero. Scales may be negative: which end is a float16 decides.
    """
    parts = [_fit(weights_GK[i : i + _GROUPS_AT_ONCE]) for i in range(0, len(weights_GK), _GROUPS_AT_ONCE)]
    numbers, scales, minimums = (torch.cat(part) for part in zip(*parts, strict=True))
    return numbers.to(torch.uint8), scales.half(), minimums.half()


def _fit(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = weights.aminmax(dim=1)
    best = _Best(weights)
    for steps in _STEPS:
        scales = (high - low) / steps
        best.offer(scales, low + scales * ((steps - TOP) / 2))
    for _ in range(_REFITS):
        best.offer(*_least_squares(weights, _nearest(weights, best.scales, best.minimums)))
    _offer_whole_steps(best, low, high)
    return _nearest(weights, best.scales, best.minimums), best.scales, best.minimums


class _Best:
    """The scales and minimums with the least squared error so far."""

    def __init__(self, weights: Tensor):
        self.weights = weights
        self.scales, self.minimums = torch.zeros(2, len(weights))
        self.errors = torch.full((len(weights),), float("inf"))

    def offer(self, scales: Tensor, minimums: Tensor, groups: Tensor | None = None) -> None:
        """groups: which ones they are for; all if not given."""
        where = slice(None) if groups is None else groups
        weights, scales, minimums = self.weights[where], _rounded(scales), _rounded(minimums)
        numbers = _nearest(weights, scales, minimums)
        errors = numbers.mul_(scales[:, None]).add_(minimums[:, None]).sub_(weights).square_().sum(1)
        better = errors < self.errors[where]
        self.scales[where] = torch.where(better, scales, self.scales[where])
        self.minimums[where] = torch.where(better, minimums, self.minimums[where])
        self.errors[where] = torch.where(better, errors, self.errors[where])


def _rounded(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST, LARGEST).half().float()


def _nearest(weights: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (weights - minimums[:, None]).mul_(inverse[:, None]).round_().clamp_(0, TOP)


def _least_squares(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The best scales and minimums for these numbers; the minimums for scales as they will be stored."""
    means = numbers.mean(1)
    numbers = numbers - means[:, None]
    scales = _rounded((numbers * weights).sum(1) / numbers.square().sum(1).clamp(min=1e-30))
    return scales, weights.mean(1) - scales * means


def _offer_whole_steps(best: _Best, low: Tensor, high: Tensor) -> None:
    """For groups whose values lie whole steps apart: that step, with a minimum up to as many steps below the lowest
    value (or, the scale negative, above the highest) as leaves room for all."""
    few = best.weights[:, :_FEW] - low[:, None]
    for steps in range(TOP, 0, -1):
        factors = torch.where(high > low, steps / (high - low), 0.0)[:, None]
        groups = (_are_whole(few * factors) & (best.errors > 0)).nonzero()[:, 0]
        groups = groups[_are_whole((best.weights[groups] - low[groups, None]) * factors[groups])]
        if not len(groups):
            continue
        scales = (high[groups] - low[groups]) / steps
        for below in range(TOP - steps + 1):
            best.offer(scales, low[groups] - below * scales, groups)
            best.offer(-scales, high[groups] + below * scales, groups)


def _are_whole(places: Tensor) -> Tensor:
    return (places.round() - places).abs_().amax(1) < _OFF
