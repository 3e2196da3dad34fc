"""The controller with drafters that estimate their chances and are dear as well: a pass of a head for every level.

Look-ups with estimates are asked for all they have, for it costs them nothing; these must not be.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.request import Request, Step
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.decoding.theory import best_num_drafted, walltime_factor
from pilotfish.engine.controller import Adaptive
from pilotfish.engine.curve import CostCurve

FLAT = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.15, 16: 1.4}
STEEP = {1: 1.0, 2: 1.9, 4: 3.6, 8: 7.0, 16: 14.0}
Level = Callable[[random.Random], float]


def request(name: str = "r", *, greedy: bool = True) -> Request:
    params = SamplingParams(max_tokens=10**6, temperature=0.0 if greedy else 1.0)
    one = Request(name, (1, 2), params, 0, "rejection", 10**6)
    one.tokens.append(3)
    return one


class Heads:
    """A world in which drafting costs by the token. Greedy requests get chances, the others tokens that were drawn."""

    def __init__(self, points: dict[int, float], per_token: float, *, growing: bool = True):
        self.truth = CostCurve(dict(points))
        self.controller = Adaptive(CostCurve(dict(points)), growing=[growing])
        self.per_token = per_token
        self.random = random.Random(2)
        self.limits: list[list[int]] = []
        self.lengths: list[list[int]] = []

    def run(self, num_steps: int, level: Level, requests: Sequence[Request]) -> float:
        """Speed-up over plain decoding in these steps."""
        seconds, tokens = 0.0, 0
        self.limits, self.lengths = [], []
        for _ in range(num_steps):
            limits = self.controller.limits(requests)
            alphas = [level(self.random) for _ in requests]
            drafts, drafting = self._draft(requests, limits, alphas)
            steps = []
            for one, draft, alpha in zip(requests, drafts, alphas, strict=True):
                accepted = 0
                while accepted < len(draft) and self.random.random() < alpha:
                    accepted += 1
                steps.append(Step(one, range(1), tuple([0] * (accepted + 1)), num_accepted=accepted))
                tokens += accepted + 1
            rows = sum(len(draft) + 1 for draft in drafts)
            spent = self.truth.seconds(rows)
            self.controller.spent(rows, spent)
            self.controller.learn(steps, drafts)
            seconds += spent + drafting
            self.limits.append(limits)
            self.lengths.append([len(draft) for draft in drafts])
        return tokens * self.truth.seconds(len(requests)) / len(requests) / seconds

    def _draft(
        self, requests: Sequence[Request], limits: Sequence[int], alphas: Sequence[float]
    ) -> tuple[list[Draft], float]:
        drafts, drafting = [EMPTY] * len(requests), self.per_token * max(limits)
        asked = [i for i, limit in enumerate(limits) if limit]
        made = []
        for i in asked:
            own = [0] * limits[i]
            if requests[i].params.greedy:
                made.append(chain(own, chances=tuple(alphas[i] ** (k + 1) for k in range(len(own))), kind="tree"))
            else:
                made.append(chain(own, torch.ones(len(own), 1), kind="drawn"))
        if asked:
            who = [requests[i] for i in asked]
            self.controller.drafted(0, who, made, drafting)
            for i, draft in zip(asked, self.controller.cut(0, who, made), strict=True):
                drafts[i] = draft
        return drafts, drafting


@pytest.mark.parametrize(("alpha", "per_token"), [(0.8, 0.1), (0.6, 0.05), (0.9, 0.2), (0.8, 0.02)])
def test_it_comes_close_to_the_best_length(alpha: float, per_token: float) -> None:
    world = Heads(FLAT, per_token)
    world.run(150, lambda _r: alpha, [request()])
    verify = [world.truth.seconds(rows) for rows in range(1, 17)]
    best = best_num_drafted(alpha, per_token, verify=verify)
    assert world.run(400, lambda _r: alpha, [request()]) > 0.9 * walltime_factor(alpha, best, per_token, verify[best])


def test_as_a_look_up_it_would_draft_too_much() -> None:
    """The control: asked for all it has, at every step, or for nothing."""
    gains = []
    for growing in (True, False):
        world = Heads(FLAT, 0.1, growing=growing)
        world.run(200, lambda _r: 0.8, [request()])
        gains.append(world.run(400, lambda _r: 0.8, [request()]))
    assert gains[0] > gains[1] + 0.2


def test_where_it_does_not_pay_it_is_seldom_asked() -> None:
    for points, alpha, per_token in ((STEEP, 0.5, 0.05), (FLAT, 0.1, 0.3), (FLAT, 0.3, 0.9)):
        world = Heads(points, per_token)
        world.run(200, lambda _r, alpha=alpha: alpha, [request()])  # type: ignore[misc]
        assert world.run(400, lambda _r, alpha=alpha: alpha, [request()]) > 0.955  # type: ignore[misc]
        assert sum(limits == [0] for limits in world.limits) > 300


def test_good_drafts_are_kept_long_and_poor_ones_cut_short() -> None:
    world = Heads({1: 1.0, 8: 3.0, 16: 6.0}, 0.02)
    world.run(200, lambda r: r.choice([0.05, 0.95]), [request()])
    seen: list[float] = []

    def level(source: random.Random) -> float:
        seen.append(source.choice([0.05, 0.95]))
        return seen[-1]

    assert world.run(300, level, [request()]) > 1.1
    poor = [n for (n,), alpha in zip(world.lengths, seen, strict=True) if alpha < 0.5]
    good = [n for (n,), alpha in zip(world.lengths, seen, strict=True) if alpha > 0.5]
    assert sum(good) / len(good) > 4 and sum(poor) / len(poor) < 0.5


def test_drafts_that_are_cut_to_nothing_count_when_the_length_is_chosen() -> None:
    """One in twenty is good, and drafting dear: what is kept is good, but asking does not pay."""
    world = Heads({1: 1.0, 8: 3.0, 16: 6.0}, 0.1)
    world.run(400, lambda r: 0.95 if r.random() < 0.05 else 0.02, [request()])
    assert world.run(400, lambda r: 0.95 if r.random() < 0.05 else 0.02, [request()]) > 0.93


def test_drawn_drafts_go_by_what_drawn_ones_did() -> None:
    """Greedy requests draft well, and the others badly: the length of a drawn draft must not go by the former."""
    world = Heads(FLAT, 0.02)
    pair = [request("sure"), request("unsure", greedy=False)]
    rates = iter([0.9, 0.05] * 10**5)
    world.run(300, lambda _r: next(rates), pair)
    world.run(200, lambda _r: next(rates), pair)
    sure, unsure = zip(*world.lengths, strict=True)
    assert sum(sure) / len(sure) > 4 and sum(unsure) / len(unsure) < 0.7
