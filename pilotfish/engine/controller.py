"""Controllers: how many nodes each request may draft in the next pass. No tensors, no models, no clock of its own.

`Fixed` is a number. `Adaptive` maximises expected tokens per second of the whole batch, from measured costs (a pass
over R rows; a draft over B requests and K tokens) and measured acceptance (per request, per kind of draft, per
position). Drafting nothing is one of its choices, and never a permanent one: it is probed again.

What keeps it exact: `limits` is asked before anything is drawn, and knows only the past. `cut` looks at a draft, and
therefore only ever touches tokens that were chosen, not drawn (Draft.probs is None), where any cut is exact.

    gain of a row   s_k, the share of drafts of this kind whose k-th node was accepted (along a chain it falls with k)
    value           (B + sum of s) / (t_draft + t_target(B + rows)),  the rows taken in order of s
"""

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from ..decoding.draft import MAX_NODES, Draft
from ..decoding.request import Request, Step

_MOST = 16  # a pass over more rows than this is not flat on any machine we measured
_MEMORY = 0.97  # weight of the past after one more observation
_PRIOR_TRIES = 3.0  # how many observations a request needs before it outweighs what all requests showed
_PRIOR_RATE = 0.5
_PROBE_EVERY = 24  # steps without a draft after which one is tried again


class Controller(Protocol):
    """Decides the number of nodes; learns from what happened."""

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """The most nodes for each request in the next pass. Called before drafting."""

    def cut(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        """Shorten drafts that were chosen, not drawn."""

    def learn(self, steps: Sequence[Step], drafts: Sequence[Draft]) -> None:
        """What was kept of each draft."""

    def drafted(self, requests: Sequence[Request], drafts: Sequence[Draft], seconds: float) -> None:
        """What the drafter's call cost."""

    def spent(self, num_rows: int, seconds: float) -> None:
        """What the target's pass over ``num_rows`` cost, its verification included."""

    def release(self, request: Request) -> None:
        """The request is over."""


class Fixed:
    """Always the same number."""

    def __init__(self, num_nodes: int):
        assert 0 <= num_nodes <= MAX_NODES
        self.num_nodes = num_nodes

    def limits(self, requests: Sequence[Request]) -> list[int]:
        return [self.num_nodes] * len(requests)

    def cut(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def learn(self, steps: Sequence[Step], drafts: Sequence[Draft]) -> None:
        pass

    def drafted(self, requests: Sequence[Request], drafts: Sequence[Draft], seconds: float) -> None:
        pass

    def spent(self, num_rows: int, seconds: float) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


@dataclass(slots=True)
class PassCosts:
    """Seconds of a pass by its number of rows: measured points, straight lines between them, drifting with use."""

    points: dict[int, float]

    def seconds(self, num_rows: int) -> float:
        """Never falls with more rows: a measured dip is noise."""
        if not self.points or num_rows == 0:
            return 0.0
        rows = sorted(self.points)
        below = [r for r in rows if r <= num_rows]
        above = [r for r in rows if r > num_rows]
        if not below:  # between a cost that does not depend on length and one that is proportional
            return self.points[rows[0]] * (1 + num_rows / rows[0]) / 2
        low = max(self.points[r] for r in below)
        if not above:
            last = below[-1]
            slope = low / last if len(below) == 1 else max(0.0, (low - self.points[below[-2]]) / (last - below[-2]))
            return low + slope * (num_rows - last)
        left, right = below[-1], above[0]
        high = max(low, self.points[right])
        return low + (high - low) * (num_rows - left) / (right - left)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Blend in a measurement; outliers (a page fault, another process) are held back."""
        if num_rows > 4 * _MOST:
            return  # a prompt
        known = self.points.get(num_rows)
        if known is None:
            self.points[num_rows] = seconds
        elif seconds < known:  # what was fast once can be so again; slowness may be somebody else's
            self.points[num_rows] = known + 0.3 * (seconds - known)
        else:
            self.points[num_rows] = known + 0.1 * (min(seconds, 2 * known) - known)


@dataclass(slots=True)
class _Rate:
    """A share with a fading memory."""

    hits: float = 0.0
    tries: float = 0.0

    def observe(self, hit: bool) -> None:
        self.hits = self.hits * _MEMORY + hit
        self.tries = self.tries * _MEMORY + 1

    def fade(self) -> None:
        self.hits *= _MEMORY
        self.tries *= _MEMORY

    def mean(self, prior: float) -> float:
        return (self.hits + prior * _PRIOR_TRIES) / (self.tries + _PRIOR_TRIES)


@dataclass(slots=True)
class _Memory:
    """Acceptance by kind of draft and index of the node; index _MOST - 1 stands for all later ones."""

    rates: dict[tuple[Hashable, int], _Rate] = field(default_factory=dict)
    idle: int = 0  # steps since the last draft

    def observe(self, kind: Hashable, accepted: Set[int], num_drafted: int) -> None:
        for node in range(_MOST):
            if node < num_drafted:
                self.rates.setdefault((kind, node), _Rate()).observe(node in accepted)
            elif (kind, node) in self.rates:
                self.rates[kind, node].fade()  # long not tried: what the nodes before it promise counts again

    def mean(self, kind: Hashable, node: int, prior: float) -> float:
        rate = self.rates.get((kind, node))
        return prior if rate is None else rate.mean(prior)


def _accepted(draft: Draft, step: Step) -> set[int]:
    """The nodes on the accepted path, read off the emitted tokens."""
    nodes: set[int] = set()
    children, node = draft.children(), -1
    for token in step.tokens[: step.num_accepted]:
        node = next(child for child in children[node] if draft.tokens[child] == token)
        nodes.add(node)
    return nodes


class Adaptive:
    """As many nodes as pay, for each request, in each step. costs: of a target pass, measured at the start."""

    def __init__(self, costs: PassCosts, most: int = _MOST):
        self.costs, self.most = costs, min(most, _MOST)
        self.draft_costs = PassCosts({})  # by the length of the longest draft; a look-up's hardly depends on it
        self._everyone = _Memory()
        self._own: dict[str, _Memory] = {}
        self._kinds: set[Hashable] = set()

    def limits(self, requests: Sequence[Request]) -> list[int]:
        survivals = [self._best_survival(request) for request in requests]
        chosen = self._choose(survivals, self.draft_costs)
        for i, request in enumerate(requests):
            own = self._memory(request)
            own.idle = 0 if chosen[i] else own.idle + 1
            if own.idle > _PROBE_EVERY:
                chosen[i], own.idle = 1, 0
        return chosen

    def cut(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        cuttable = [
            i for i, draft in enumerate(drafts) if draft.probs is None and draft.kind is not None and len(draft)
        ]
        fixed_rows = sum(len(draft) for i, draft in enumerate(drafts) if i not in cuttable)
        survivals = [self._survival(requests[i], drafts[i].kind, len(drafts[i])) for i in cuttable]
        lengths = self._choose(survivals, PassCosts({}), fixed_rows + len(drafts) - len(cuttable))
        result = list(drafts)
        for i, length in zip(cuttable, lengths, strict=True):
            known = self._memory(requests[i])
            if length == 0 and known.idle >= _PROBE_EVERY:
                length, known.idle = 1, 0
            elif length == 0:
                known.idle += 1
            result[i] = drafts[i].first(length)
        return result

    def learn(self, steps: Sequence[Step], drafts: Sequence[Draft]) -> None:
        for step, draft in zip(steps, drafts, strict=True):
            if len(draft) and step.tokens and not step.finish:  # of a run cut short not every node was decided
                self._kinds.add(draft.kind)
                accepted = _accepted(draft, step)
                for memory in (self._everyone, self._memory(step.request)):
                    memory.observe(draft.kind, accepted, len(draft))

    def drafted(self, requests: Sequence[Request], drafts: Sequence[Draft], seconds: float) -> None:
        longest = max(map(len, drafts))
        if longest == 0 or any(request.num_output == 0 for request in requests):
            return  # at first a draft model reads the prompt: no measure of drafting
        self.draft_costs.observe(longest, seconds)

    def spent(self, num_rows: int, seconds: float) -> None:
        self.costs.observe(num_rows, seconds)

    def release(self, request: Request) -> None:
        self._own.pop(request.id, None)

    def predicted_speedup(self, request: Request) -> float:
        """Tokens per second with the present choice over those of plain decoding, as the controller sees it."""
        survival = self._best_survival(request)
        (length,) = self._choose([survival], self.draft_costs)
        seconds = self.costs.seconds(1 + length) + self.draft_costs.seconds(length)
        return (1 + sum(survival[:length])) * self.costs.seconds(1) / seconds

    def _memory(self, request: Request) -> _Memory:
        return self._own.setdefault(request.id, _Memory())

    def _survival(self, request: Request, kind: Hashable, length: int) -> list[float]:
        own, result, prior = self._memory(request), list[float](), _PRIOR_RATE
        for node in range(min(length, self.most)):
            result.append(own.mean(kind, node, self._everyone.mean(kind, node, prior)))
            prior = result[-1] ** ((node + 2) / (node + 1))  # an unknown node goes on as those before it fell
        return result

    def _best_survival(self, request: Request) -> list[float]:
        """Of all kinds seen, the one with the most expected tokens: which kind comes is known only after drafting."""
        kinds = self._kinds or {None}
        return max((self._survival(request, kind, self.most) for kind in kinds), key=sum)

    def _choose(self, survivals: Sequence[Sequence[float]], drafting: PassCosts, fixed_rows: int = 0) -> list[int]:
        """Lengths that maximise (tokens) / (seconds); rows are taken in order of their survival."""
        rows = sorted(((s, i) for i, own in enumerate(survivals) for s in own), reverse=True)
        lengths, base = [0] * len(survivals), len(survivals) + fixed_rows
        best, tokens = list(lengths), float(base)
        best_value = base / self.costs.seconds(base) if base else 0.0
        for count, (s, i) in enumerate(rows, start=1):
            tokens += s
            lengths[i] += 1
            value = tokens / (self.costs.seconds(base + count) + drafting.seconds(max(lengths)))
            if value > best_value:
                best, best_value = list(lengths), value
        return best
