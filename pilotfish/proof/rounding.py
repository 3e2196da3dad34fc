"""Is a difference between two texts a near-tie, or a fault? Decided by what rounding does to this very row.

It does not know how the texts came about. The one trick: nothing is assumed about number formats; the last row of
the common prefix is computed in passes of different shapes, as plain decoding and verification do, and the largest
difference between the results *is* the rounding that has to be allowed for.

Unless it is no rounding: what a format's errors cannot add up to (an activation scale shared by all rows, say) is
never allowed for. `plausible` is that bound, and generous: about 800 ulps of float32, 6 of bfloat16.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from ..decoding.noise import exponentials
from ..decoding.paths import split
from ..decoding.sampling import SamplingParams, process, warp
from ..models.base import CausalLM
from ..paged.batch import Feed, lay_out
from ..paged.cache import KVCache
from .edges import distance_to_edge

SLACK = 2.0  # two scores, each off by what was measured
_FORBIDDEN = -1e30  # instead of -inf, which has no differences
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two texts part at ``position``: one has ``plain`` there, the other ``drafted``.

    margin: the gap between the two tokens' scores in a plain pass, or what either lacks to enter or leave the law, if
    that is what it takes. rounding: the largest difference of any score
    between passes of different shapes, as far as that is plausible; 0 where the format allows no near-ties.
    """

    position: int
    plain: int
    drafted: int
    margin: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        return self.margin <= SLACK * self.rounding

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "fault"
        return (
            f"{kind} at position {self.position}: token {self.plain} or {self.drafted}, margin {self.margin:.2g}, "
            f"rounding {self.rounding:.2g}"
        )


def divergence(
    model: CausalLM,
    path: Sequence[int],
    num_prompt: int,
    plain: Sequence[int],
    drafted: Sequence[int],
    num_beside: int,
    *,
    params: SamplingParams,
    seed: int,
    stop_ids: Set[int] = frozenset(),
) -> Divergence:
    """Judge two continuations of a path (its text's first ``num_prompt`` tokens are the prompt) that differ at once.

    num_beside: rows that were in a verification pass beside the one in question, those of other texts included.
    An empty continuation (one text simply ended) has no score: its margin is infinite.
    """
    _, prefix = split(path)
    if not plain or not drafted:
        one, other = (plain or [-1])[0], (drafted or [-1])[0]
        return Divergence(len(prefix), one, other, float("inf"), 0.0)
    logits = row_in_shapes(model, path, num_prompt, drafted, num_beside)
    context = (prefix[:num_prompt], [prefix[num_prompt:]], stop_ids)
    processed = [process(logits_V.double()[None], params, *context)[0].clamp(min=_FORBIDDEN) for logits_V in logits]
    rows = [scores(logits_V, params.temperature, seed, len(prefix)) for logits_V in processed]
    margin = _margin(rows[0], processed[0], plain[0], drafted[0], params)
    allowed = plausible(model, logits[0]) * max(1.0, 1 / params.temperature if params.temperature else 1.0)
    rounding = min(spread(rows), allowed) if can_round(model) else 0.0
    return Divergence(len(prefix), plain[0], drafted[0], margin, rounding)


def _margin(scores_V: Tensor, processed_V: Tensor, plain: int, drafted: int, params: SamplingParams) -> float:
    """What has to change for ``drafted`` to win: it enters the law, if it is outside, and the other is overtaken or
    leaves the law, if it is ahead."""
    lead = float(scores_V[plain] - scores_V[drafted])
    if params.greedy or (params.top_p == 1 and params.min_p == 0):
        return abs(lead)
    logits_V = processed_V / params.temperature
    law_V = warp(logits_V[None], SamplingParams(top_p=params.top_p, min_p=params.min_p))[0]
    leaves = distance_to_edge(logits_V, plain, params)
    if law_V[drafted] > 0:
        return min(abs(lead), leaves)
    return max(distance_to_edge(logits_V, drafted, params), min(max(lead, 0.0), leaves))


def can_round(model: CausalLM) -> bool:
    """Whether near-ties are to be expected. float64 differs in its last bits too, but no two scores are so close by
    chance; a bitwise model's rows do not depend on the shape of a pass at all."""
    return model.info.dtype != torch.float64 and not model.info.bitwise


def plausible(model: CausalLM, logits_V: Tensor) -> float:
    """The most that the shape of a pass may change a logit of this row: 0 for a bitwise model."""
    if model.info.bitwise:
        return 0.0
    return _RELATIVE.get(model.info.dtype, 5e-2) * max(1.0, float(logits_V.abs().max()))


def spread(rows: Sequence[Tensor]) -> float:
    """The largest difference between any two rows, over all tokens."""
    stacked_RV = torch.stack(list(rows))
    return float((stacked_RV.amax(0) - stacked_RV.amin(0)).max())


def scores(logits_V: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """What is compared: the logits, or log p - log E, the race under ``coupled``. float64 [V]."""
    logits_V = logits_V.double()
    if temperature == 0:
        return logits_V
    return torch.log_softmax(logits_V / temperature, 0) - exponentials(seed, position, len(logits_V)).to(logits_V).log()


def row_in_shapes(
    model: CausalLM, path: Sequence[int], num_prompt: int, following: Sequence[int], num_beside: int
) -> list[Tensor]:
    """The logits after a path from three histories: a one-row pass first, then a pass with ``num_beside`` rows
    more, then the same with the text before it read as verification reads it, in chunks.

    The rows beside hold ``following``, over and over: they come later in the text, so the row cannot see them.
    """
    source, prefix = split(path)
    room = model.info.context - len(prefix)
    draft = list(islice(cycle(following), max(0, min(room, num_beside))))
    cache = model.new_cache(-(-(len(prefix) + len(draft)) // 16) + 1)
    last = len(prefix) - 1
    rows = []
    chunks = _in_chunks(num_prompt, last, 1 + num_beside)
    for history, tail in (([last], []), ([last], draft), (chunks, draft)):
        cache.open("row", prefix, source)
        past = 0
        for end in history if last else []:
            _pass(model, cache, prefix[past:end], past)
            cache.commit("row", range(end - past), prefix)
            past = end
        rows.append(_pass(model, cache, [prefix[last], *tail], last)[0])
        cache.release("row")
        cache.pool.forget_all()
    return rows


def _in_chunks(num_prompt: int, last: int, size: int) -> list[int]:
    """Ends of chunks: the prompt, then ``size`` rows at a time, up to the last row but not including it."""
    start = min(num_prompt, last)
    return [start + (last - start) % size, *range(start + (last - start) % size + size, last + 1, size)]


def _pass(model: CausalLM, cache: KVCache, tokens: Sequence[int], past: int) -> Tensor:
    assert cache.reserve("row", len(tokens))
    batch = lay_out([Feed("row", tokens, past, len(tokens))], cache, model.info.device)
    return model.forward(batch, cache).logits_NV
