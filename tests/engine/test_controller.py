"""The controller on simulated machines: it finds the K that pays, and where none does it drafts nothing for a while."""

import random
import statistics
from collections.abc import Callable, Hashable

import pytest

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.request import Request, Step
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.decoding.theory import best_num_drafted, walltime_factor
from pilotfish.engine.controller import Adaptive, Fixed
from pilotfish.engine.curve import CostCurve

FLAT = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.15, 16: 1.4}
STEEP = {1: 1.0, 2: 1.9, 4: 3.6, 8: 7.0, 16: 14.0}


def request(name: str = "r") -> Request:
    one = Request(name, (1, 2), SamplingParams(max_tokens=10**6), 0, "coupled", 10**6)
    one.tokens.append(3)
    return one


class Machine:
    """A world with known costs and acceptance; counts seconds and tokens."""

    def __init__(
        self,
        points: dict[int, float],
        alpha: Callable[[int], float],
        *,
        per_token: float = 0.0,
        per_unread: float = 0.0,
        kind: Callable[[int], Hashable] = lambda _step: None,
        by_kind: dict[Hashable, float] | None = None,
    ):
        self.truth = CostCurve(dict(points))
        self.controller = Adaptive(CostCurve(dict(points)))
        self.alpha, self.per_token, self.kind, self.by_kind = alpha, per_token, kind, by_kind or {}
        self.per_unread, self.unread = per_unread, 200
        self.random = random.Random(0)
        self.seconds, self.tokens, self.num_steps = 0.0, 0, 0
        self.lengths: list[int] = []

    def step(self, requests: list[Request]) -> None:
        limits = self.controller.limits(requests)
        kind = self.kind(self.num_steps)
        proposed: list[Draft] = [chain([0] * limit, kind=kind) if limit else EMPTY for limit in limits]
        asked = [(r, d) for r, d in zip(requests, proposed, strict=True) if len(d)]
        drafting = self.per_token * max(limits)
        if asked:
            drafting, self.unread = drafting + self.per_unread * self.unread, 0
        cut: dict[str, Draft] = {}
        if asked:
            self.controller.drafted(0, [r for r, _ in asked], [d for _, d in asked], drafting)
            kept = self.controller.cut(0, [r for r, _ in asked], [d for _, d in asked])
            cut = {r.id: draft for (r, _), draft in zip(asked, kept, strict=True)}
        drafts = [cut.get(r.id, EMPTY) for r in requests]
        rows = sum(len(draft) + 1 for draft in drafts)
        spent = self.truth.seconds(rows)
        steps = []
        for one, draft in zip(requests, drafts, strict=True):
            alpha = self.by_kind.get(kind, self.alpha(self.num_steps))
            accepted = 0
            while accepted < len(draft) and self.random.random() < alpha:
                accepted += 1
            steps.append(Step(one, range(1), tuple([0] * (accepted + 1)), num_accepted=accepted))
        self.controller.spent(rows, spent)
        self.controller.learn(steps, drafts)
        self.seconds += spent + drafting
        self.tokens += sum(len(step.tokens) for step in steps)
        self.num_steps += 1
        self.unread += len(steps[0].tokens)
        self.lengths.append(len(drafts[0]))

    def run(self, num_steps: int, requests: list[Request] | None = None) -> float:
        """Speed-up over plain decoding in these steps."""
        requests = requests or [request()]
        self.seconds, self.tokens, self.lengths = 0.0, 0, []
        for _ in range(num_steps):
            self.step(requests)
        plain = self.truth.seconds(len(requests)) / len(requests)
        return self.tokens * plain / self.seconds


@pytest.mark.parametrize(("alpha", "per_token"), [(0.8, 0.0), (0.8, 0.1), (0.6, 0.05), (0.9, 0.2), (0.4, 0.02)])
def test_it_comes_close_to_the_best_fixed_number(alpha: float, per_token: float) -> None:
    machine = Machine(FLAT, lambda _step: alpha, per_token=per_token)
    machine.run(100)
    verify = [machine.truth.seconds(rows) for rows in range(1, 17)]
    best = best_num_drafted(alpha, per_token, verify=verify)
    assert machine.run(400) > 0.93 * walltime_factor(alpha, best, per_token, verify[best])


def test_where_nothing_pays_it_drafts_nothing_and_loses_next_to_nothing() -> None:
    for points, alpha, per_token in ((STEEP, 0.5, 0.0), (FLAT, 0.02, 0.3), (FLAT, 0.3, 0.9)):
        machine = Machine(points, lambda _step, alpha=alpha: alpha, per_token=per_token)  # type: ignore[misc]
        machine.run(150)
        assert machine.run(400) > 0.955
        assert machine.lengths.count(0) > 350


def test_nothing_is_not_for_good() -> None:
    machine = Machine(FLAT, lambda step: 0.0 if step < 300 else 0.9)
    machine.run(300)
    assert machine.lengths[-100:].count(0) > 80  # the rest are trials
    machine.run(300)
    assert machine.run(100) > 2.5


def test_a_model_that_fell_behind_is_not_taken_for_a_slow_one() -> None:
    """A draft model that was not asked must read what it missed; that is no measure of what a draft costs."""
    points = {1: 44.0, 2: 44.0, 3: 45.0, 4: 49.0, 6: 55.0, 8: 61.0, 16: 114.0}
    machine = Machine(points, lambda step: 0.8 if step > 100 else 0.05, per_token=14.0, per_unread=1.5)
    gains = []
    for name in range(16):
        machine.unread = 150  # a prompt
        gains.append(machine.run(90, [request(str(name))]))
    best = max(walltime_factor(0.8, k, 14.0 / 44, machine.truth.seconds(k + 1) / 44) for k in range(1, 8))
    assert statistics.mean(gains[-8:]) > 0.88 * best > 1.2


def test_trials_of_a_dear_drafter_are_rare() -> None:
    """Each makes its model read what it missed."""
    machine = Machine(FLAT, lambda _step: 0.1, per_token=0.5, per_unread=0.2)
    machine.run(100)
    assert machine.run(2000) > 0.97


def test_kinds_are_told_apart() -> None:
    """Half of the drafts are good and half are worthless: the worthless ones are cut, the good ones kept long."""
    machine = Machine(FLAT, lambda _s: 0.0, kind=lambda step: step % 2, by_kind={0: 0.9, 1: 0.0})
    machine.run(200)
    machine.run(200)
    good, bad = machine.lengths[0::2], machine.lengths[1::2]
    assert sum(good) / len(good) > 5
    assert sum(bad) / len(bad) < 0.5


def test_a_kind_that_was_worthless_is_tried_again() -> None:
    """Although another kind is drafted all the while."""
    odd = {0: 0.9, 1: 0.0}
    machine = Machine(FLAT, lambda _s: 0.0, kind=lambda step: step % 2, by_kind=odd)  # type: ignore[arg-type]
    machine.run(200)
    odd[1] = 0.9
    machine.run(1500)
    machine.run(100)
    later = machine.lengths[1::2]
    assert sum(later) / len(later) > 5


def test_drawn_drafts_are_never_cut() -> None:
    import torch

    controller = Adaptive(CostCurve(dict(STEEP)))
    drawn = chain([1, 2, 3], torch.full((3, 8), 1 / 8), kind="worthless")
    for _ in range(50):
        assert controller.cut(0, [request()], [drawn]) == [drawn]
        controller.learn([Step(request(), range(1), (0,))], [drawn])


def test_a_full_batch_drafts_less_than_a_single_request() -> None:
    points = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 2.0, 32: 4.0, 64: 8.0}
    alone, crowd = Machine(points, lambda _s: 0.6), Machine(points, lambda _s: 0.6)
    alone.run(200)
    crowd.run(200, [request(str(i)) for i in range(16)])
    assert sum(alone.lengths) > 3 * sum(crowd.lengths)


class Treeing:
    """A drafter of trees, 0.25 of a target pass a level: as deep as pays by what it is told of that; every level holds
    the right token with a chance of 0.6, over four nodes."""

    def __init__(self, *, told: bool = True):
        self.controller = Adaptive(CostCurve(FLAT), growing=[True])
        self.random = random.Random(1)
        self.told, self.depths = told, list[int]()

    def run(self, num_steps: int) -> float:
        one, seconds, tokens = request(), 0.0, 0
        self.depths = []
        for _ in range(num_steps):
            (limit,) = self.controller.limits([one])
            draft = EMPTY
            if limit:
                cost = self.controller.level_cost(0, [one]) if self.told else 0.0
                draft = self._tree(limit, cost)
                seconds += 0.25 * draft.depth
                self.controller.drafted(0, [one], [draft], 0.25 * draft.depth)
                (draft,) = self.controller.cut(0, [one], [draft])
            self.depths.append(draft.depth)
            path = list[int]()
            while (
                children := [n for n, parent in enumerate(draft.parents) if parent == (path[-1] if path else -1)]
            ) and self.random.random() < 0.15 * len(children):
                path.append(children[0])
            spent = CostCurve(FLAT).seconds(1 + len(draft))
            seconds, tokens = seconds + spent, tokens + 1 + len(path)
            self.controller.spent(1 + len(draft), spent)
            kept = tuple(draft.tokens[node] for node in path)
            self.controller.learn([Step(one, range(1), (*kept, 99), num_accepted=len(kept))], [draft])
        return tokens / seconds

    def _tree(self, limit: int, cost: float) -> Draft:
        """Four nodes a level, the first of which is followed."""
        parents, chances, reached, tokens = list[int](), list[float](), 1.0, 1.0
        for level in range(8):
            gain = 0.6 * reached
            if level and gain * (1 + level * cost) <= cost * tokens:
                break
            parents += [4 * (level - 1) if level else -1] * 4
            chances += [gain / 4] * 4
            reached, tokens = gain, tokens + gain
        return Draft(tuple(range(len(parents))), tuple(parents), chances=tuple(chances)).first(limit)


def test_a_drafter_of_trees_is_told_what_a_level_takes() -> None:
    """1.6 tokens for 1.1 + 0.25 passes are worth it, eight levels are not."""
    one = Treeing()
    one.run(100)
    assert one.run(300) > 1.1 > 1.02 > Treeing(told=False).run(300)
    assert statistics.mean(one.depths) < 3


def test_fixed_is_fixed() -> None:
    controller = Fixed(3)
    assert controller.limits([request(), request()]) == [3, 3]
    assert controller.cut(0, [request()], [EMPTY]) == [EMPTY]


# -- drafts that carry estimates, and several arms ------------------------------------------------------------------


class Lookups:
    """A world in which look-ups estimate their own chances, with a bias, and a second arm may stand behind them."""

    def __init__(
        self, points: dict[int, float], *, bias: float = 1.0, seconds: float = 0.0, second: float | None = None
    ):
        self.truth = CostCurve(points)
        self.controller = Adaptive(CostCurve(points), num_arms=1 if second is None else 2)
        self.bias, self.seconds_a_call, self.second = bias, seconds, second
        self.random = random.Random(1)
        self.asked: list[int] = []

    def run(self, num_steps: int, level: Callable[[random.Random], float], requests: list[Request]) -> float:
        seconds, tokens = 0.0, 0
        for _ in range(num_steps):
            self.controller.limits(requests)
            drafts, drafting = self._draft(level, requests)
            rows = sum(len(draft) + 1 for draft in drafts)
            steps = []
            for one, draft in zip(requests, drafts, strict=True):
                chances = draft.chances or tuple((self.second or 0) ** (i + 1) for i in range(len(draft)))
                draw, accepted = self.random.random(), 0
                while accepted < len(draft) and draw < min(
                    1.0, chances[accepted] * (self.bias if draft.chances else 1)
                ):
                    accepted += 1
                steps.append(Step(one, range(1), tuple([0] * (accepted + 1)), num_accepted=accepted))
                tokens += accepted + 1
            spent = self.truth.seconds(rows)
            self.controller.spent(rows, spent)
            self.controller.learn(steps, drafts)
            seconds += spent + drafting
        return tokens * self.truth.seconds(len(requests)) / len(requests) / seconds

    def _draft(self, level: Callable[[random.Random], float], requests: list[Request]) -> tuple[list[Draft], float]:
        drafts, drafting = [EMPTY] * len(requests), 0.0
        for arm in range(1 if self.second is None else 2):
            waiting = [i for i, draft in enumerate(drafts) if not len(draft)]
            limits = self.controller.arm_limits(arm, [requests[i] for i in waiting])
            asked = [(i, limit) for i, limit in zip(waiting, limits, strict=True) if limit]
            if not asked:
                continue
            own = [requests[i] for i, _ in asked]
            if arm == 0:
                chance = [level(self.random) for _ in asked]
                made = [chain([0] * 6, chances=tuple(c ** (k + 1) for k in range(6))) for c in chance]
            else:
                made = [chain([0] * min(limit, 8)) for _, limit in asked]
            seconds = self.seconds_a_call if arm == 0 else 0.2 * max(map(len, made))
            self.asked.append(arm)
            drafting += seconds
            self.controller.drafted(arm, own, made, seconds)
            cut = self.controller.cut(arm, own, made) if arm == 0 else made
            if arm == 1:
                self.controller.cut(arm, own, made)
            for (i, _), draft in zip(asked, cut, strict=True):
                drafts[i] = draft
        return drafts, drafting


def several(num: int) -> list[Request]:
    return [request(str(i)) for i in range(num)]


def test_estimates_are_believed_from_the_first_step_on() -> None:
    world = Lookups({1: 1.0, 8: 2.0, 16: 4.0})
    assert world.run(4, lambda _r: 0.95, several(1)) > 1.5


def test_estimates_that_are_too_good_are_found_out() -> None:
    honest, boasting = Lookups({1: 1.0, 8: 2.5, 16: 5.0}), Lookups({1: 1.0, 8: 2.5, 16: 5.0}, bias=0.1)
    assert honest.run(300, lambda r: r.choice([0.1, 0.8]), several(1)) > 1.2
    boasting.run(150, lambda r: r.choice([0.1, 0.8]), several(1))
    assert boasting.run(300, lambda r: r.choice([0.1, 0.8]), several(1)) > 0.97


def test_lookups_that_save_less_than_they_take_are_given_up_and_tried_again() -> None:
    world = Lookups(STEEP, seconds=0.05)
    world.run(200, lambda _r: 0.3, several(1))
    world.asked.clear()
    assert world.run(400, lambda _r: 0.3, several(1)) > 0.99
    assert 0 < len(world.asked) < 40
    world.truth, world.controller.costs = CostCurve(FLAT), CostCurve(FLAT)
    world.run(900, lambda _r: 0.9, several(1))
    assert world.run(200, lambda _r: 0.9, several(1)) > 2


def test_a_poor_draft_is_passed_over_for_an_arm_that_promises_more() -> None:
    """Look-ups of 30 % before a model that is right in 90 %: the model drafts. Of 99 %: they do, at no cost."""
    poor = Lookups(FLAT, second=0.9)
    poor.run(200, lambda _r: 0.3, several(1))
    poor.asked.clear()
    assert poor.run(200, lambda _r: 0.3, several(1)) > 1.5
    assert poor.asked.count(1) > 150
    good = Lookups(FLAT, second=0.9)
    good.run(200, lambda _r: 0.99, several(1))
    good.asked.clear()
    good.run(200, lambda _r: 0.99, several(1))
    assert good.asked.count(1) < 20


def test_it_says_what_it_expects() -> None:
    machine = Machine(FLAT, lambda _step: 0.8, per_token=0.05)
    machine.run(200)
    assert machine.controller.predicted_gain == pytest.approx(machine.run(200), rel=0.15)


def test_what_it_expects_is_counted_once_a_step_however_often_it_is_asked() -> None:
    """The scheduler asks for the running requests and again for each that is admitted."""
    controller, everyone = Adaptive(CostCurve({1: 1.0, 8: 1.0})), several(8)
    for _ in range(5):
        controller.limits(everyone[:5])
        for one in everyone[5:]:
            controller.limits([one])
        controller.learn([Step(one, range(1), (0,)) for one in everyone], [EMPTY] * 8)
    assert controller.predicted_gain == pytest.approx(1.0)
