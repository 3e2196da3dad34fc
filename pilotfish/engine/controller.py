"""Controllers: which arm drafts for each request in the next pass, and how many nodes. No tensors, no clock of its own.

`Fixed` is a number. `Adaptive` maximises expected tokens per second of the whole batch, from measured costs (a pass
over R rows; each arm's drafting) and measured acceptance. Drafting nothing is one of its choices, and never a permanent
one: it is probed again. An arm is one drafter of an ordered list (`Drafter.arms`); most drafters are their only one.

What keeps it exact: `limits` is asked before anything is drawn, and knows only the past. `cut` looks at a draft, and
therefore only ever touches tokens that were chosen, not drawn (Draft.probs is None), where any cut is exact, and so is
passing a draft over in favour of the next arm.

    gain of a row   s, the chance that the node is accepted (never larger than its parent's)
    value           (B + sum of s) / (t_draft + t_target(B + rows)),  the rows taken in order of s
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..decoding.draft import MAX_NODES, Draft, accepted_nodes
from ..decoding.request import Request, Step
from .acceptance import DEEPEST, Acceptance, Rates
from .curve import CostCurve, DraftCosts

_MOST = 24  # nodes of a draft: more seldom pay, and room for them is taken from prompts that are being read
_PROBE_EVERY = 24  # steps without a draft after which an arm is tried again
_PROBE_SELDOM = 400  # the same for look-ups that failed again and again
_PROBE_LENGTH = 4  # steps of a look-up's trial: one alone may find nothing
_TRIAL_LENGTH = 4  # steps of another drafter's: in the first a model catches up, which the others make worth it
_TRIAL_SHARE = 0.02  # of all time, for what these trials lose
_BEHIND = 4  # steps without a call after which a model's next one is spent on catching up
_ODD = 3.0  # a call's time is believed up to this factor
_RECENT = 0.05  # weight of a step in what an arm's look-ups bring and cost


class Controller(Protocol):
    """Decides the number of nodes; learns from what happened."""

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """The most nodes for each request in the next pass, whichever arm drafts. Called before drafting."""

    def arm_limits(self, arm: int, requests: Sequence[Request]) -> list[int]:
        """The same for one arm: 0 if it shall not be asked. Called after `limits`."""

    def cut(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        """Shorten drafts that were chosen, not drawn; an empty one passes the request on to the next arm."""

    def level_cost(self, arm: int, requests: Sequence[Request]) -> float:
        """What one more in depth takes an arm that drafts for these, in plain passes of the target; 0 if not known."""

    def learn(self, steps: Sequence[Step], drafts: Sequence[Draft]) -> None:
        """What was kept of each draft."""

    def drafted(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft], seconds: float) -> None:
        """What an arm's call cost."""

    def spent(self, num_rows: int, seconds: float) -> None:
        """What the target's pass over ``num_rows`` cost, its verification included."""

    def release(self, request: Request) -> None:
        """The request is over."""


class Fixed:
    """Always the same number, and the first arm that has an idea."""

    def __init__(self, num_nodes: int):
        assert 0 <= num_nodes <= MAX_NODES
        self.num_nodes = num_nodes

    def limits(self, requests: Sequence[Request]) -> list[int]:
        return [self.num_nodes] * len(requests)

    def arm_limits(self, arm: int, requests: Sequence[Request]) -> list[int]:
        return [self.num_nodes] * len(requests)

    def cut(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def level_cost(self, arm: int, requests: Sequence[Request]) -> float:
        return 0.0

    def learn(self, steps: Sequence[Step], drafts: Sequence[Draft]) -> None:
        pass

    def drafted(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft], seconds: float) -> None:
        pass

    def spent(self, num_rows: int, seconds: float) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


@dataclass(slots=True)
class _Worth:
    """What an arm's look-ups saved and took of late, in seconds a step. idle: steps without one; patience: how many
    of those until the next trial, longer after each that failed."""

    saved: float = 0.0
    taken: float = 0.0
    num_calls: int = 0
    idle: int = 0
    patience: int = _PROBE_EVERY
    trial: int = _PROBE_LENGTH  # calls that are free

    def note(self, saved: float, taken: float) -> None:
        self.num_calls += 1
        if self.num_calls > _PROBE_LENGTH:
            taken = min(taken, _ODD * self.taken)  # another process had the core
        weight = max(_RECENT, 1 / self.num_calls)
        self.saved += weight * (saved - self.saved)
        self.taken += weight * (taken - self.taken)
        self.trial = max(0, self.trial - 1)

    def ask(self) -> bool:
        """Whether the next step may look up."""
        if self.saved > self.taken:
            self.idle, self.patience = 0, _PROBE_EVERY
            return True
        if self.trial:
            return True
        self.idle += 1
        if self.idle < self.patience:
            return False
        self.idle, self.patience, self.trial = 0, min(2 * self.patience, _PROBE_SELDOM), _PROBE_LENGTH
        return True


@dataclass(slots=True)
class _Arm:
    """What is known of one drafter.

    costs: of a call, by the length of its longest draft; levels: by its depth. tried: seconds that trials lost.
    estimates: whether its drafts carry chances, in which case `cut` decides, and before drafting all there is to ask is
    whether its calls save more than they take; that depends on how many requests run (``worth``, by the bit length of
    their number). grows: whether longer drafts take longer, chances or not: then the length is chosen before as well,
    by what drafts promised so far. branches: whether its drafts do: then it sets their depth itself, by `level_cost`,
    and more nodes take no longer. kinds: of drafts seen, for greedy requests and for others.
    """

    grows: bool = False
    costs: DraftCosts = field(default_factory=DraftCosts)
    levels: DraftCosts = field(default_factory=DraftCosts)
    tried: float = 0.0
    kinds: dict[bool, set[Hashable]] = field(default_factory=dict)
    estimates: bool = False
    branches: bool = False
    worth: dict[int, _Worth] = field(default_factory=dict)
    seconds: float = 0.0  # of the call that is being judged

    def drafting(self, length: int) -> float:
        """Seconds of a call for drafts of this length."""
        return self.costs.mean if self.branches and length else self.costs.seconds(length)

    def worth_at(self, num_requests: int) -> _Worth:
        fresh = _Worth(trial=max(_PROBE_LENGTH, _PROBE_EVERY // num_requests))
        return self.worth.setdefault(num_requests.bit_length(), fresh)


@dataclass(slots=True)
class _Own:
    """What is known of one request. Per arm: granted: nodes allowed in this step; idle: steps without any; trial: steps
    that are left of one; asked: number of the step in which the arm was asked last. dropped: by arm and kind, drafts
    that were cut to nothing since one was kept."""

    granted: list[int]
    idle: list[int]
    trial: list[int]
    asked: list[int]
    rates: Rates = field(default_factory=dict)
    dropped: dict[Hashable, int] = field(default_factory=dict)
    drafted: int = 0  # the arm whose draft is being judged


class Adaptive:
    """As many nodes as pay, for each request, in each step. costs: of a target pass, measured at the start. growing:
    per arm, whether longer drafts with chances take longer (`Drafter.cost_grows`).

    predicted_gain: over all steps so far, tokens per second over plain decoding's, by its own costs and chances.
    num_judged: tokens that these steps gave.
    """

    def __init__(
        self, costs: CostCurve, *, num_arms: int = 1, most: int = _MOST, growing: Sequence[bool] | None = None
    ):
        self.costs, self.most = costs, most
        self.acceptance = Acceptance()
        self._arms = [_Arm(grows) for grows in growing or [False] * num_arms]
        assert len(self._arms) == num_arms
        self._own: dict[str, _Own] = {}
        self._expected_gain = self._step_seconds = 0.0  # of the step that is under way
        self._plain_seconds = self._seconds = 0.0
        self.num_judged = self._num_steps = 0

    # -- before drafting -----------------------------------------------------------------------------------------

    def limits(self, requests: Sequence[Request]) -> list[int]:
        for arm in range(len(self._arms)):
            self._grant(arm, requests)
        return [max(self._of(request).granted) for request in requests]

    def arm_limits(self, arm: int, requests: Sequence[Request]) -> list[int]:
        return [self._of(request).granted[arm] for request in requests]

    def level_cost(self, arm: int, requests: Sequence[Request]) -> float:
        plain = self.costs.seconds(len(requests))
        return self._arms[arm].levels.slope / plain if plain else 0.0

    def _grant(self, arm: int, requests: Sequence[Request]) -> None:
        known = self._arms[arm]
        if known.estimates:
            length = self.most if known.worth_at(len(requests)).ask() else 0
            for request in requests:
                self._of(request).granted[arm] = length
            return
        lengths = self._choose([self._typical(arm, request) for request in requests], known.drafting)
        for request, length in zip(requests, lengths, strict=True):
            own = self._of(request)
            own.idle[arm] = 0 if length else own.idle[arm] + 1
            own.trial[arm] = 0 if length else max(0, own.trial[arm] - 1)
            if own.idle[arm] > _PROBE_EVERY and known.tried <= _TRIAL_SHARE * self._seconds:
                own.idle[arm], own.trial[arm] = 0, _TRIAL_LENGTH
            own.granted[arm] = max(length, int(own.trial[arm] > 0))

    def _typical(self, arm: int, request: Request) -> list[float]:
        """Of all kinds seen, the one with the most expected tokens: which kind comes is known only after drafting."""
        own, kinds = self._of(request).rates, self._arms[arm].kinds.get(request.params.greedy) or {None}
        most = min(self.most, DEEPEST)
        return max((self.acceptance.typical(own, arm, kind, most) for kind in kinds), key=sum)

    # -- after drafting ------------------------------------------------------------------------------------------

    def drafted(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft], seconds: float) -> None:
        known = self._arms[arm]
        known.seconds = seconds
        self._step_seconds += seconds
        owns = [self._of(request) for request in requests]
        if all(self._num_steps - own.asked[arm] <= _BEHIND for own in owns):
            # Else a draft model catches up, or reads the prompt, and a look-up indexes it: no measure of drafting.
            known.costs.observe(max(map(len, drafts)), seconds)
            known.levels.observe(max(draft.depth for draft in drafts), seconds)
        if any(drafts):
            known.branches = not all(draft.is_chain for draft in drafts)
        for own in owns:
            own.asked[arm] = self._num_steps

    def cut(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        known = self._arms[arm]
        known.estimates = known.estimates or (not known.grows and any(draft.chances is not None for draft in drafts))
        cuttable = [i for i, draft in enumerate(drafts) if len(draft) and _was_chosen(draft)]
        fixed_rows = sum(len(draft) for i, draft in enumerate(drafts) if i not in cuttable)
        chances = [
            self.acceptance.expected(self._of(request).rates, arm, draft)
            for request, draft in zip(requests, drafts, strict=True)
        ]
        for request, draft, own_chances in zip(requests, drafts, chances, strict=True):
            if known.grows and draft.chances:
                known.kinds.setdefault(request.params.greedy, set()).add(None)
                self.acceptance.promise(self._of(request).rates, arm, own_chances)
        lengths = self._choose([chances[i] for i in cuttable], _free, fixed_rows + len(drafts) - len(cuttable))
        result = list(drafts)
        for i, length in zip(cuttable, lengths, strict=True):
            own, kind = self._of(requests[i]), (arm, drafts[i].kind)
            dropped = own.dropped.get(kind, 0)
            if length == 0 and dropped >= _PROBE_EVERY:
                length = 1
            elif self._value(len(requests), sum(chances[i][:length]), length) < self._best_later(arm, requests[i]):
                length = 0
            own.dropped[kind] = 0 if length else dropped + 1
            result[i] = drafts[i].first(length)
        self._account(arm, requests, result, [sum(c[: len(d)]) for c, d in zip(chances, result, strict=True)])
        return result

    def _account(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft], gains: Sequence[float]) -> None:
        """What the step shall bring, and whether the arm was worth asking."""
        for request, draft in zip(requests, drafts, strict=True):
            if len(draft):
                self._of(request).drafted = arm
        gain = sum(gains)
        self._expected_gain += gain
        num, known = len(requests), self._arms[arm]
        plain = self.costs.seconds(num)
        saved = gain * plain / num - (self.costs.seconds(num + sum(map(len, drafts))) - plain)
        if known.estimates and all(request.num_output for request in requests):
            known.worth_at(num).note(saved, known.seconds)
        if any(self._of(request).trial[arm] for request in requests):
            known.tried += max(0.0, known.seconds - saved)

    def _value(self, num_requests: int, gain: float, num_nodes: int, drafting: float = 0.0) -> float:
        """Tokens per second if all requests drafted like this."""
        return (1 + gain) * num_requests / (self.costs.seconds(num_requests * (1 + num_nodes)) + drafting)

    def _best_later(self, arm: int, request: Request) -> float:
        """What the best arm behind this one promises, had it to draft for this request alone; 0 if there is none."""
        best = 0.0
        for later in range(arm + 1, len(self._arms)):
            length, known = self._of(request).granted[later], self._arms[later]
            if length and not known.estimates:
                gain = sum(self._typical(later, request)[:length])
                best = max(best, self._value(1, gain, length, known.drafting(length)))
        return best

    # -- after the pass ------------------------------------------------------------------------------------------

    def spent(self, num_rows: int, seconds: float) -> None:
        self.costs.observe(num_rows, seconds)

    def learn(self, steps: Sequence[Step], drafts: Sequence[Draft]) -> None:
        for step, draft in zip(steps, drafts, strict=True):
            if len(draft) and step.tokens and not step.finish:  # of a run cut short not every node was decided
                own = self._of(step.request)
                if draft.chances is None:
                    self._arms[own.drafted].kinds.setdefault(step.request.params.greedy, set()).add(draft.kind)
                accepted = accepted_nodes(draft, step.tokens[: step.num_accepted])
                self.acceptance.observe(own.rates, own.drafted, draft, accepted)
        self._num_steps += 1
        judged = [step for step in steps if step.tokens]
        if judged:
            num_rows = len(judged) + sum(map(len, drafts))
            self.num_judged += sum(len(step.tokens) for step in judged)
            expected = len(judged) + self._expected_gain
            self._plain_seconds += expected * self.costs.seconds(len(judged)) / len(judged)
            self._seconds += self.costs.seconds(num_rows) + self._step_seconds
        self._expected_gain = self._step_seconds = 0.0

    def release(self, request: Request) -> None:
        self._own.pop(request.id, None)

    @property
    def predicted_gain(self) -> float:
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    # -- small helpers -------------------------------------------------------------------------------------------

    def _of(self, request: Request) -> _Own:
        own = self._own.get(request.id)
        if own is None:
            num_arms = len(self._arms)
            own = _Own([0] * num_arms, [0] * num_arms, [0] * num_arms, [-_BEHIND - 1] * num_arms)
            self._own[request.id] = own
        return own

    def _choose(
        self, chances: Sequence[Sequence[float]], drafting: Callable[[int], float], fixed_rows: int = 0
    ) -> list[int]:
        """Lengths that maximise (tokens) / (seconds); rows are taken in order of their chances.

        The step's own ratio, not the pace of late: how many tokens lie in easy and in hard stretches is the text's
        affair, so each stretch is best passed at its own best pace.
        """
        rows = sorted(((s, -node, i) for i, own in enumerate(chances) for node, s in enumerate(own)), reverse=True)
        lengths, base = [0] * len(chances), len(chances) + fixed_rows
        best, tokens = list(lengths), float(base)
        best_value = base / self.costs.seconds(base) if base else 0.0
        for count, (s, _, i) in enumerate(rows, start=1):
            tokens += s
            lengths[i] += 1
            value = tokens / (self.costs.seconds(base + count) + drafting(max(lengths)))
            if value > best_value:
                best, best_value = list(lengths), value
        return best


def _free(_length: int) -> float:
    return 0.0


def _was_chosen(draft: Draft) -> bool:
    return draft.probs is None and (draft.kind is not None or draft.chances is not None)
