"""How near a token is to the edge of what min_p and top_p keep: the other place where rounding can change a text.

It does not know races or models. The one trick: a tolerance is a shift of any log-probability against any other, and
what the sums of a nucleus can become under it is bounded from both sides, so nothing has to be sampled.
"""

import math

import torch
from torch import Tensor

from ..decoding.sampling import SamplingParams

_FAR = 64.0  # no tolerance is ever as large


def distance_to_edge(logits_V: Tensor, token: int, params: SamplingParams) -> float:
    """The smallest shift of log-probabilities by which this token might enter or leave the law.

    logits_V: processed and divided by the temperature, float64. top_k is not looked at.
    """
    low, high = 0.0, _FAR
    if not _may_cross(logits_V, token, params, high):
        return math.inf
    while high - low > 1e-9 + 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _may_cross(logits_V, token, params, middle) else (middle, high)
    return high


def _may_cross(logits_V: Tensor, token: int, params: SamplingParams, tolerance: float) -> bool:
    below_V = logits_V - logits_V.max()
    own = float(below_V[token])
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if abs(own - floor) <= tolerance:
        return True
    if own < floor or params.top_p == 1:
        return False
    weights_V = below_V.exp()
    most, least = (float(weights_V[below_V >= floor + shift].sum()) for shift in (-tolerance, tolerance))
    others_V = torch.arange(len(logits_V), device=logits_V.device) != token
    ahead = float(weights_V[(below_V > own + tolerance) & others_V].sum()) / most
    behind = float(weights_V[(below_V >= own - tolerance) & others_V].sum()) / max(least, 1.0)
    growth = math.exp(tolerance)
    return ahead / growth < params.top_p <= behind * growth
