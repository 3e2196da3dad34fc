"""Acceptance: how often nodes of a class were accepted, for one request and for all, with a fading memory.

It does not know costs or what is decided. The one trick: a class is what was known of a node *before* it was judged.
Where the drafter estimates a node's chance, that is its class (in tenths) and the estimate is what is believed until
there is evidence; else the class is the kind of draft and the node's index, and an unknown node goes on as those
before it fell.
"""

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

from ..decoding.draft import Draft

DEEPEST = 16  # nodes that are told apart by index; the last class stands for all later ones
_PRIOR_RATE = 0.5
# Weight of the past after one more observation, and observations that a request needs before they outweigh what all
# requests showed (and all requests, before they outweigh the prior). Nodes with an estimate start close to the truth.
_MEMORY, _TRIES = 0.97, 3.0
_ESTIMATED_MEMORY, _ESTIMATED_TRIES = 0.99, 20.0


@dataclass(slots=True)
class _Rate:
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, hit: float, memory: float) -> None:
        self.hits = self.hits * memory + hit
        self.tries = self.tries * memory + 1

    def fade(self) -> None:
        self.hits *= _MEMORY
        self.tries *= _MEMORY

    def mean(self, prior: float, weight: float) -> float:
        return (self.hits + prior * weight) / (self.tries + weight)


Rates = dict[Hashable, _Rate]


class Acceptance:
    """Of all requests together; ``own`` rates belong to one request and are kept by the caller."""

    def __init__(self) -> None:
        self.rates: Rates = {}

    def expected(self, own: Rates, arm: int, draft: Draft) -> list[float]:
        """Each node's chance to be accepted, for the first DEEPEST nodes or, with estimates, for all."""
        if draft.chances is None:
            return self.typical(own, arm, draft.kind, len(draft))
        result = []
        for chance in draft.chances:
            key = _class(arm, chance)
            result.append(self._mean(own, key, chance, _ESTIMATED_TRIES))
        return result

    def typical(self, own: Rates, arm: int, kind: Hashable, num_nodes: int) -> list[float]:
        """The same for a draft of this kind, not yet made."""
        result, prior = list[float](), _PRIOR_RATE
        for node in range(min(num_nodes, DEEPEST)):
            result.append(self._mean(own, (arm, kind, node), prior, _TRIES))
            prior = result[-1] ** ((node + 2) / (node + 1))
        return result

    def observe(self, own: Rates, arm: int, draft: Draft, accepted: Set[int]) -> None:
        if draft.chances is None:
            self._count(own, (arm, draft.kind), [float(node in accepted) for node in range(len(draft))])
            return
        for rates in (self.rates, own):
            for node, chance in enumerate(draft.chances):
                rates.setdefault(_class(arm, chance), _Rate()).observe(node in accepted, _ESTIMATED_MEMORY)

    def promise(self, own: Rates, arm: int, chances: Sequence[float]) -> None:
        """What a draft with estimates is expected to bring, by index: what `typical` says of such drafts, whose kind is
        None. Those that are cut, and never judged, count as well; nodes it does not have fall as those before them."""
        n = len(chances)
        self._count(own, (arm, None), [*chances, *(chances[-1] ** ((node + 1) / n) for node in range(n, DEEPEST))])

    def _count(self, own: Rates, kind: tuple[int, Hashable], hits: Sequence[float]) -> None:
        for rates in (self.rates, own):
            for node in range(DEEPEST):
                if node < len(hits):
                    rates.setdefault((*kind, node), _Rate()).observe(hits[node], _MEMORY)
                elif (*kind, node) in rates:
                    rates[*kind, node].fade()  # long not tried: what the nodes before it promise counts again

    def _mean(self, own: Rates, key: Hashable, prior: float, weight: float) -> float:
        common = self.rates.get(key)
        believed = prior if common is None else common.mean(prior, weight)
        mine = own.get(key)
        return believed if mine is None else mine.mean(believed, weight)


def _class(arm: int, chance: float) -> Hashable:
    return arm, "chance", int(10 * chance)
