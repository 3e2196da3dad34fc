"""Where two texts part, and how nearly the target was undecided there.

It does not know who wrote the texts. The one trick: it asks the target itself, in one plain pass over what both texts
have in common; a margin of a few rounding errors is a tie that a different order of summing broke the other way, a
larger one is a bug.

The margin is in units of logits: at temperature 0 the difference of the two tokens' logits; with a seed the difference
of their scores in the race that picks the token, log p + Gumbel noise (see `pilotfish.decoding.noise.race`).
"""

from collections.abc import Sequence

from torch import Tensor

from ..decoding.noise import exponentials
from ..decoding.paths import split
from ..decoding.sampling import SamplingParams, warp
from ..models.base import CausalLM
from ..paged.batch import Feed, lay_out

_CHUNK = 512  # rows of one pass


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two texts differ (or one of them has ended); None if they are equal."""
    if len(ours) == len(theirs) and tuple(ours) == tuple(theirs):
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def margin(model: CausalLM, path: Sequence[int], preferred: int, other: int, params: SamplingParams) -> float:
    """How far ahead of ``other`` the target sees ``preferred`` after this path (prompt and common output)."""
    source, prefix = split(path)
    logits_V = next_logits(model, prefix, source)
    if params.greedy:
        return float(logits_V[preferred]) - float(logits_V[other])
    assert params.seed is not None, "without a seed two samples have nothing to do with each other"
    log_p_V = warp(logits_V[None], params)[0].double().log()
    scores_V = log_p_V - exponentials(params.seed, len(prefix), len(log_p_V)).to(log_p_V.device).log()
    return float(scores_V[preferred]) - float(scores_V[other])


def next_logits(model: CausalLM, prefix: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """The target's logits [V] after a prefix (of what it makes of a source), with a cache of their own."""
    cache = model.new_cache(len(prefix) // 16 + 1, 16)
    cache.open("prefix", prefix, source)
    reserved = cache.reserve("prefix", len(prefix))
    assert reserved
    for start in range(0, len(prefix), _CHUNK):
        chunk = prefix[start : start + _CHUNK]
        last = start + len(chunk) == len(prefix)
        output = model.forward(lay_out([Feed("prefix", chunk, start, int(last))], cache, model.info.device), cache)
        cache.commit("prefix", range(len(chunk)), prefix)
    return output.logits_NV[0]
