"""Draws against the exact law: every true rule passes, and each wrong one is found out, by the right class."""

from collections.abc import Callable

import pytest
import torch

from pilotfish.decoding import verify as rules
from pilotfish.decoding.sampling import SamplingParams, warp
from pilotfish.decoding.verify import Verdict
from pilotfish.drafters.draft_model import DraftModelDrafter
from pilotfish.engine import judge
from pilotfish.proof.actors import AskewLM, Liar
from pilotfish.proof.ground import Watch
from pilotfish.proof.laws import ExactLaws, Experiment, Tallies, draw, exact_law, uncertain_prefixes
from pilotfish.proof.memo import MemoLM
from tests import adversaries

PREFIXES = [(1, 2, 3), (5, 6, 7, 5, 6)]
CLASSES = ("first", "pair", "accepted", "residual", "bonus")
CERTAIN = 1e-6  # a true rule meets this by chance in one of a million; the draws are the same in every run


@pytest.fixture(scope="module")
def laws(table) -> ExactLaws:
    return ExactLaws(MemoLM(table), 8)


def tally(laws: ExactLaws, rule="rejection", build=None, num_draws=500, num_drafted=2) -> Tallies:
    watch = Watch()
    experiment = Experiment("test", build or askew(laws), rule, 1, num_drafted)
    tallies = draw(laws, PREFIXES, experiment, num_draws=num_draws, seed=0, watch=watch)
    assert watch.num_failed_drafts == 0
    assert watch.faults == []
    assert tallies.pair.fit().num_draws == num_draws
    return tallies


def askew(laws: ExactLaws) -> Callable:
    return lambda setting: DraftModelDrafter(AskewLM(laws.memo), setting)


def failing(tallies: Tallies) -> set[str]:
    return {name for name in CLASSES if getattr(tallies, name).fit().p_value < CERTAIN}


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_the_rules_follow_the_law(laws, rule):
    tallies = tally(laws, rule)
    assert failing(tallies) == set()
    assert 0.3 < tallies.num_accepted / tallies.num_drafted < 0.9
    tested = {name for name in CLASSES if getattr(tallies, name).fit().num_degrees}
    assert tested == ({*CLASSES} if rule == "rejection" else {"first", "pair", "bonus"})


@pytest.mark.parametrize("kind", ["chosen trees", "drawn trees", "chosen chains", "drawn chains", "plain"])
def test_other_drafts_follow_the_law(laws, table, kind):
    build = {
        "chosen trees": lambda _setting: adversaries.random_trees(12),
        "drawn trees": lambda _setting: adversaries.random_trees(12, table.law),
        "chosen chains": lambda _setting: adversaries.guesser(12),
        "drawn chains": lambda _setting: adversaries.sampled_chain(lambda text: table.law(text, 2.0)),
        "plain": lambda _setting: adversaries.Scripted(lambda _request, _limit: rules.Draft()),
    }[kind]
    tallies = tally(laws, build=build, num_drafted=5)
    assert failing(tallies) == set()
    assert (tallies.num_drafted > 0) == (kind != "plain")
    if "chains" in kind:
        assert tallies.accepted.fit().num_degrees > 0


# -- wrong on purpose --------------------------------------------------------------------------------------------------


def lenient(draft, p_NV, rule, noise):
    """Accepts with min(1, 1.5 p / q)."""

    class Lenient:
        choose, race = noise.choose, noise.race

        def accept(self, depth, sibling, probability):
            return noise.accept(depth, sibling, 1.5 * probability)

    return rules.verify(draft, p_NV, rule, Lenient())


def residual_is_p(draft, p_NV, rule, noise):
    """After a rejection, draws from p itself instead of what is left of it."""
    verdict = rules.verify(draft, p_NV, rule, noise)
    depth = len(verdict.path)
    if depth == len(draft):
        return verdict
    return Verdict(verdict.path, noise.choose(depth, p_NV[depth]))


def stale_bonus(draft, p_NV, rule, noise):
    """Draws the bonus token from the row before."""
    verdict = rules.verify(draft, p_NV, rule, noise)
    if len(draft) and len(verdict.path) == len(draft):
        return Verdict(verdict.path, noise.choose(len(draft), p_NV[-2]))
    return verdict


def block_by_weights(draft, p_NV, rule, noise):
    """Block verification with the weights themselves for chances, the variant without h."""
    weight, kept, weights = 1.0, 0, [1.0]
    for i, token in enumerate(draft.tokens):
        weight = min(1.0, weight * float(p_NV[i, token]) / float(draft.probs[i, token]))
        weights.append(weight)
        if noise.accept(i, 0, weight):
            kept = i + 1
    left_V = p_NV[kept]
    if kept < len(draft):
        rest_V = (weights[kept] * left_V - draft.probs[kept]).clamp(min=0)
        left_V = rest_V if float(rest_V.sum()) > 0 else left_V
    return Verdict(tuple(range(kept)), noise.choose(kept, left_V))


@pytest.mark.parametrize(
    ("rule", "mutant", "found_by"),
    [
        ("rejection", lenient, {"first", "pair", "accepted"}),
        ("rejection", residual_is_p, {"first", "pair", "residual"}),
        ("rejection", stale_bonus, {"bonus"}),
        ("block", block_by_weights, {"first", "pair"}),
        ("block", residual_is_p, {"first", "pair"}),
        ("block", stale_bonus, {"bonus"}),
    ],
)
def test_a_wrong_rule_is_found_out(laws, monkeypatch, rule, mutant, found_by):
    monkeypatch.setattr(judge, "verify", mutant)
    assert failing(tally(laws, rule, num_draws=1000)) >= found_by


def test_a_drafter_that_lies_is_found_out_where_it_lies(laws):
    tallies = tally(laws, build=lambda setting: Liar(askew(laws)(setting)))
    assert failing(tallies) >= {"pair", "accepted"}
    assert "bonus" not in failing(tallies), "what follows an accepted draft is still the target's own"


def test_a_drafter_that_picks_among_its_draws_is_found_out(laws, table):
    """Draws, looks, and drops what it does not like: each law is true, the choice to draft at all is not."""
    honest = adversaries.sampled_chain(lambda text: table.law(text, 2.0))

    def pick(request, limit):
        draft = honest.script(request, limit)
        return draft if draft.tokens[0] < 6 else rules.Draft()

    assert "pair" in failing(tally(laws, build=lambda _setting: adversaries.Scripted(pick)))


# -- its parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [2, 8, 12, 50])
def test_the_exact_law_is_warp_s(table, top_k):
    logits_V = table.logits_of([1, 2, 3])
    p_V = warp(logits_V[None], SamplingParams(top_k=top_k))[0]
    found = exact_law(logits_V, top_k)
    assert sum(found.values()) == pytest.approx(1)
    assert found == pytest.approx({token: p for token, p in enumerate(p_V.tolist()) if p > 0})


def test_ties_at_the_edge_are_kept():
    assert exact_law(torch.tensor([0.0, 1.0, 1.0, 2.0]), 2).keys() == {1, 2, 3}


def test_draws_go_where_the_law_is_wide(table):
    memo = MemoLM(table)
    laws = ExactLaws(memo, 8)
    found = uncertain_prefixes(laws, [([1, 2], [3, 4, 5]), ([6], [7])])
    assert set(found) == {(1, 2), (1, 2, 3), (1, 2, 3, 4), (6,)}
    entropies = [-sum(p * torch.tensor(p).log().item() for p in laws.after(prefix).values()) for prefix in found]
    assert entropies == sorted(entropies, reverse=True)
    assert memo.num_passes == 2, "one a text"


def test_the_same_seed_draws_the_same(laws):
    one, other = tally(laws, num_draws=100), tally(laws, num_draws=100)
    assert one.pair.counts == other.pair.counts
    assert one.num_accepted == other.num_accepted
