"""Faults that drafts must meet deep, warped or penalised to show: each is found out, by the check made for it."""

import pytest
import torch

from pilotfish.decoding import noise, request
from pilotfish.decoding.noise import Lane, SeededNoise
from pilotfish.decoding.sampling import SamplingParams, warp
from pilotfish.drafters.draft_model import DraftModelDrafter
from pilotfish.engine import judge
from pilotfish.proof.actors import AskewLM
from pilotfish.proof.edges import distance_to_edge
from pilotfish.proof.ground import Watch
from pilotfish.proof.identity import EVERYTHING, PENALTIES, SHAPED_TEMPERATURE, compare
from pilotfish.proof.laws import ExactLaws, Experiment, draw, exact_law
from pilotfish.proof.memo import MemoLM
from pilotfish.proof.passes import draw_texts

CERTAIN = 1e-7
RULES = ["rejection", "block"]


@pytest.mark.parametrize("rule", RULES)
def test_several_passes_follow_the_law(rule):
    fit = draw_texts(rule, 1500, 0).fit()
    assert fit.num_degrees == 30
    assert fit.p_value > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_accepting_all_from_some_depth_on_is_found_out(monkeypatch, rule):
    honest = SeededNoise.accept
    monkeypatch.setattr(SeededNoise, "accept", lambda self, depth, *rest: depth >= 2 or honest(self, depth, *rest))
    assert draw_texts(rule, 1500, 0).fit().p_value < CERTAIN


def test_coins_that_come_back_in_a_later_pass_are_found_out(monkeypatch):
    """``rejection`` reads no coin beyond the first failure, so for it nothing comes back (enumerated in
    tests/decoding)."""

    def by_place(self, depth, sibling, probability):
        return noise.uniform(self.seed, self.position + depth, Lane.ACCEPT, sibling) < probability

    monkeypatch.setattr(SeededNoise, "accept", by_place)
    assert draw_texts("block", 3000, 0).fit().p_value < CERTAIN
    assert draw_texts("rejection", 1500, 0).fit().p_value > 1e-3


@pytest.mark.parametrize(("temperature", "shape"), [(0.0, PENALTIES), (SHAPED_TEMPERATURE, EVERYTHING)])
def test_penalties_that_do_not_see_the_draft_are_found_out(ground, table, monkeypatch, temperature, shape):
    own = ground(table, max_tokens=32)
    outcome = compare(own, temperature, shape)
    assert outcome.check.passed
    assert shape.name in outcome.check.name
    monkeypatch.setattr(request.Request, "row_outputs", lambda self, draft: [self.output] * (len(draft) + 1))
    assert not compare(own, temperature, shape).check.passed


def warmer(logits_NV, params, *context):
    return warp(logits_NV if params.temperature == 1 else logits_NV / 1.3, params, *context)


def without_top_p(logits_NV, params, *context):
    p_NV = warp(logits_NV, params, *context)
    return p_NV if params.top_p == 1 else logits_NV.softmax(1)


@pytest.mark.parametrize("mutant", [warmer, without_top_p])
def test_rows_of_a_draft_that_are_warped_in_another_way_are_found_out(ground, table, monkeypatch, mutant):
    laws = ExactLaws(MemoLM(table), 4, 1.3, 0.9)

    def p_value(rule):
        build = lambda setting: DraftModelDrafter(AskewLM(laws.memo), setting)  # noqa: E731
        experiment = Experiment("test", build, rule, 1, 4, length=4, room=1)
        tallies = draw(laws, [(1, 2, 3)], experiment, num_draws=500, seed=0, watch=Watch())
        assert tallies.text.fit().num_draws == 500
        assert tallies.pair.fit().num_draws == 0
        return tallies.text.fit().p_value

    assert min(map(p_value, RULES)) > 1e-3
    own_judge = judge._judge_one

    def judging(request, draft, *rest):
        judge.warp = mutant if len(draft) else warp
        return own_judge(request, draft, *rest)

    monkeypatch.setattr(judge, "warp", warp)
    monkeypatch.setattr(judge, "_judge_one", judging)
    assert max(map(p_value, RULES)) < CERTAIN
    assert not compare(ground(table, max_tokens=32), SHAPED_TEMPERATURE, EVERYTHING).check.passed


def test_the_exact_law_with_temperature_and_top_p_is_warp_s(table):
    logits_V = table.logits_of([1, 2, 3])
    for top_p in (0.3, 0.6, 0.9):
        p_V = warp(logits_V[None], SamplingParams(top_k=6, temperature=1.3, top_p=top_p))[0]
        expected = {token: p for token, p in enumerate(p_V.tolist()) if p > 0}
        assert exact_law(logits_V, 6, 1.3, top_p) == pytest.approx(expected)


@pytest.mark.parametrize("kept", [{"top_p": 0.7}, {"min_p": 0.2}, {"top_p": 0.8, "min_p": 0.1}])
def test_the_distance_to_the_edge_is_one_that_keeps_a_token_where_it_is(table, kept):
    """Shifts of any logits by less than half the distance, up or down, never move the token over the edge."""
    params, generator = SamplingParams(**kept), torch.Generator().manual_seed(1)
    for text in ([1, 2, 3], [4, 5], [7, 7, 2]):
        logits_V = table.logits_of(text)
        inside = warp(logits_V[None], params)[0] > 0
        for token in range(12):
            distance = distance_to_edge(logits_V, token, params)
            assert distance > 0
            for _ in range(20):
                signs_V = torch.randint(0, 2, (12,), generator=generator) * 2.0 - 1
                moved_V = logits_V + 0.49 * min(distance, 50.0) * signs_V
                assert bool(warp(moved_V[None], params)[0, token] > 0) == bool(inside[token])
