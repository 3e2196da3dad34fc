"""Drafting with an EAGLE-3 head: with an oracle in the head's place, whatever is misaligned is a rejected guess."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from pilotfish.decoding.sampling import SamplingParams, warp
from pilotfish.drafters import registry
from pilotfish.drafters.eagle3 import Eagle3Drafter, Eagle3Options
from pilotfish.drafters.first_of import FirstOfDrafter
from pilotfish.drafters.ngram import NgramDrafter, NgramOptions
from pilotfish.errors import DraftError, OptionError
from tests.adversaries import untrained_head
from tests.decoding.enumeration import outcome, seeded_noise_on
from tests.fakes import TableModel, drain, engine, joint_law, oracle
from tests.heads.oracle import OracleHead

NUM_IDS = 8
# Every token of the text and its place count.
TARGET = TableModel(NUM_IDS, order=2, num_phases=5, sharpness=1.5)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 1, 3, 5, 2, 2, 6]


def drafting(head: Any = None, *, target: TableModel = TARGET, k: int = 5, options: Any = None, **more: Any) -> Any:
    head = head or OracleHead(target)
    found = engine(target, lambda setting: Eagle3Drafter(head, setting, options), k=k, **more)
    assert isinstance(found.drafter, Eagle3Drafter)
    return found


def greedy(max_tokens: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def run(found: Any, cases: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    requests = [found.add(prompt, params)[0] for prompt, params in cases]
    drain(found)
    assert found.num_failed_drafts == 0
    for request, (prompt, params) in zip(requests, cases, strict=True):
        if params.greedy or params.seed is not None:
            assert tuple(request.output) == oracle(TARGET.logits_of, prompt, params)
    return requests


def all_accepted(requests: Sequence[Any]) -> bool:
    """Whether every chain was accepted whole. The first step, which reads the prompt, has no draft."""
    for r in requests:
        full = r.stats.per_step_accepted == r.stats.per_step_drafted
        if not (full and r.stats.per_step_drafted and len(r.stats.per_step_drafted) >= r.stats.num_steps - 2):
            return False
    return True


CHAINS = Eagle3Options(tree_width=1)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_who_knows_the_target_is_always_right(k):
    (request,) = run(drafting(k=k, options=CHAINS), [(PROMPT, greedy())])
    assert all_accepted([request]) and request.stats.num_steps <= 2 + 20 // (k + 1) + 1


def test_seeded_requests_share_the_target_s_coins():
    requests = run(drafting(options=CHAINS), [(PROMPT[:n], SamplingParams(max_tokens=16, seed=n)) for n in (3, 7)])
    assert all_accepted(requests)


def test_drawn_from_the_target_s_own_law_everything_is_accepted():
    """q = p: a draw that carries another law than its own would be rejected now and then."""
    cases = [(PROMPT[:n], SamplingParams(max_tokens=20, top_p=0.9)) for n in range(3, 11)]
    assert all_accepted(run(drafting(options=CHAINS), cases))


def watching(found: Any) -> list[tuple[Any, Any]]:
    """(text, draft) of everything that is drafted from here on."""
    seen: list[tuple[Any, Any]] = []
    ask = found.drafter.propose

    def propose(requests: Any, limits: Any) -> Any:
        drafts = ask(requests, limits)
        seen.extend((list(r.tokens), draft) for r, draft in zip(requests, drafts, strict=True) if len(draft))
        return drafts

    found.drafter.propose = propose
    return seen


@pytest.mark.parametrize("draft_ids", [None, [1, 2, 4, 5, 7]])
def test_trees_are_drawn_each_node_from_the_head_s_law_without_its_siblings(draft_ids):
    """Of a head that says what the target says, warped as the request is."""
    params = SamplingParams(max_tokens=14, temperature=0.8, top_k=6)
    found = drafting(OracleHead(TARGET, draft_ids=draft_ids), k=9)
    seen = watching(found)
    run(found, [(PROMPT[: 2 + n], params) for n in range(8)])
    trees = [(text, draft) for text, draft in seen if not draft.is_chain]
    assert len(trees) > 20 and max(len(draft) for _, draft in trees) == 9
    for text, draft in trees:
        paths = draft.paths()
        for node, path in enumerate(paths):
            logits_V = TARGET.logits_of([*text, *path[:-1]])
            if draft_ids:
                logits_V = torch.full_like(logits_V, -torch.inf).index_copy_(
                    0, torch.tensor(draft_ids), logits_V[draft_ids]
                )
            law_V = warp(logits_V[None], params)[0]
            law_V[[draft.tokens[i] for i in range(node) if draft.parents[i] == draft.parents[node]]] = 0
            torch.testing.assert_close(draft.probs[node].double(), law_V / law_V.sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_of_the_target_s_own_law_first_children_are_always_accepted(max_num_seqs):
    found = drafting(k=12, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    seen = watching(found)
    requests = run(found, [(PROMPT[:n], SamplingParams(max_tokens=20, top_p=0.9)) for n in range(3, 11)])
    depths: list[int] = []
    for _, draft in seen:
        node, depth = -1, 0
        while (child := next((c for c in range(len(draft)) if draft.parents[c] == node), -1)) >= 0:
            node, depth = child, depth + 1
        depths.append(depth)
    assert sorted(depths) == sorted(n for r in requests for n in r.stats.per_step_accepted)
    assert max(depths) > 2


def test_trees_are_drawn_for_unseeded_requests_alone():
    """Under ``coupled`` tokens are chosen, by the race; laws with penalties belong to chains."""
    found = drafting(k=9)
    seen = watching(found)
    run(found, [(PROMPT, SamplingParams(max_tokens=12, seed=1)), (PROMPT, SamplingParams(max_tokens=12, min_tokens=3))])
    assert seen and all(draft.is_chain for _, draft in seen)
    run(found, [(PROMPT, SamplingParams(max_tokens=12))])
    assert any(not draft.is_chain and draft.probs is not None for _, draft in seen)


def test_where_first_guesses_are_right_trees_grow_deep_and_where_they_are_not_broad():
    """The shape follows what was kept. An oracle's first guess never fails; a stranger's mostly does."""
    depths = []
    for seed in (None, 77):
        head = OracleHead(TARGET if seed is None else TableModel(NUM_IDS, order=2, num_phases=5, seed=seed))
        found = drafting(head, k=10, max_num_seqs=8)
        seen = watching(found)
        run(found, [(PROMPT[: 2 + n % 8], SamplingParams(max_tokens=24)) for n in range(24)])
        (shape,) = {tuple(draft.parents) for _, draft in seen[:1]}
        last = max((draft for _, draft in seen[-30:]), key=len)
        assert last.parents != shape, "it has moved"
        depths.append(max(map(len, last.paths())))
    assert depths[0] > depths[1] + 1


# The law: exactly, over all branches of chance, through the engine; and by the numbers, in batches.

SMALL = TableModel(3, order=2, seed=4, sharpness=1.0)
SIMILAR = TableModel(3, order=2, seed=4, sharpness=1.0)
SIMILAR.table = SIMILAR.table + 5 * SIMILAR.noise


def lying(found: Any, claim: Any) -> None:
    """Change what the drafter says its laws were."""
    ask = found.drafter.propose
    found.drafter.propose = lambda requests, limits: [
        draft if draft.probs is None else dataclasses.replace(draft, probs=claim(draft))
        for draft in ask(requests, limits)
    ]


def parent_s(draft: Any) -> torch.Tensor:
    """The law of the first sibling for all of them."""
    first = [draft.parents.index(parent) for parent in draft.parents]
    return draft.probs[first]


def exact_deviation(claim: Any = None) -> float:
    def once(branch: Any) -> tuple[Any, int]:
        with seeded_noise_on(branch):
            options = Eagle3Options(tree_depth=1)
            found = engine(SMALL, lambda setting: Eagle3Drafter(OracleHead(SIMILAR), setting, options), k=4)
            if claim:
                lying(found, claim)
            (request,) = found.add([1, 2], SamplingParams(max_tokens=4))
            while found.has_work:
                found.step()
            assert found.num_failed_drafts == 0 and request.stats.per_step_drafted[0] == 2, "siblings"
        return tuple(request.output[:3]), 0

    return outcome(once, lambda path: SMALL.law([1, 2, *path]), 3).deviation


def test_the_text_follows_the_target_s_law_exactly():
    """Up to the rounding of laws in float32. Its first token comes without a draft; the next two are compared."""
    assert exact_deviation() < 1e-6


def test_laws_with_siblings_left_in_are_found_out():
    assert exact_deviation(parent_s) > 1e-3


def p_value(max_num_seqs: int, claim: Any = None, num_runs: int = 500) -> float:
    """Of the hypothesis that the second and third token follow the target's joint law."""
    found = engine(
        SMALL,
        lambda setting: Eagle3Drafter(OracleHead(SIMILAR), setting, Eagle3Options(tree_depth=2)),
        k=5,
        entropy=itertools.count().__next__,
        max_num_seqs=max_num_seqs,
    )
    if claim:
        lying(found, claim)
    requests = [found.add([1, 2], SamplingParams(max_tokens=7))[0] for _ in range(num_runs)]
    while found.has_work:
        found.step()
    assert found.num_failed_drafts == 0
    counts = Counter(tuple(request.output[:3]) for request in requests)
    law = joint_law(SMALL, [1, 2], 3)
    return float(chisquare([counts[text] for text in law], [num_runs * p for p in law.values()]).pvalue)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_so_it_does_in_batches(max_num_seqs):
    assert p_value(max_num_seqs) > 1e-3


def test_in_batches_too_a_lie_is_found_out():
    assert p_value(8, parent_s) < 1e-6


@pytest.mark.parametrize("rows", [7, 24])
def test_many_at_once_in_chunks_of_any_size(rows):
    cases = [([n, *PROMPT[: 1 + n]], greedy(12 + n)) for n in range(8)]
    found = drafting(options=CHAINS, max_num_batched_tokens=rows, max_num_seqs=5)
    requests = run(found, cases)
    assert all(r.stats.per_step_accepted == r.stats.per_step_drafted != [] for r in requests)


@pytest.mark.parametrize(("num_nodes", "width"), [(1, 4), (6, 8), (12, 3), (40, 8)])
def test_trees_hold_what_the_target_says(num_nodes, width):
    """An oracle's tree begins with the target's own choice at every depth it reaches."""
    found = drafting(k=num_nodes, options=Eagle3Options(tree_width=width, tree_depth=5))
    requests = run(found, [(PROMPT[: 2 + n], greedy()) for n in range(5)])
    accepted = [n for r in requests for n in r.stats.per_step_accepted[:-1]]
    assert min(accepted) >= 1
    assert max(accepted) == min(5, num_nodes) if num_nodes in (1, 40) else max(accepted) > 1


def test_a_tree_is_worth_more_than_a_chain_where_the_head_is_unsure():
    """With a head that knows a similar table, the same nodes as a tree catch more."""
    similar = TableModel(NUM_IDS, order=2, num_phases=5, sharpness=1.5)
    similar.table = similar.table + similar.noise * 0.8
    kept = []
    for options in (CHAINS, Eagle3Options(tree_width=8)):
        found = drafting(OracleHead(similar), k=12, options=options)
        requests = run(found, [(PROMPT[: 2 + n], greedy(30)) for n in range(8)])
        kept.append(sum(sum(r.stats.per_step_accepted) / r.stats.num_steps for r in requests))
    assert kept[1] > kept[0] + 1


def test_one_pass_a_depth_for_the_whole_batch():
    found = drafting(k=4, options=CHAINS)
    run(found, [(PROMPT, greedy(11)) for _ in range(6)])
    assert found.drafter.num_passes <= 4 * found.target.num_passes
    assert found.drafter.num_passes >= 4


def test_preempted_requests_go_on_drafting():
    found = drafting(options=CHAINS, num_pages=9, max_num_seqs=4, k=4)
    requests = run(found, [(PROMPT[: 2 + n], greedy(18)) for n in range(6)])
    assert found.scheduler.num_preemptions > 0
    assert all(r.stats.per_step_accepted == r.stats.per_step_drafted for r in requests)


def test_a_prefix_found_by_both_is_seen_whole():
    """The target skips what it has in its pages; the head has the same text in its own."""
    found = drafting(options=CHAINS)
    first = run(found, [(PROMPT, greedy())])
    second = [found.add(prompt, greedy())[0] for prompt in (PROMPT, [*PROMPT[:10], 7, 7])]
    rows = found.target.num_rows
    found.step()
    assert found.target.num_rows - rows == (13 - 12) + (12 - 8), "three pages of four rows, and two"
    drain(found)
    assert found.num_failed_drafts == 0 and all_accepted([*first, *second])


def test_a_prefix_that_the_head_has_not_read_yet_is_read_in_time():
    """The second request comes while the first one's prompt is still being read, in chunks, and nothing was drafted."""
    found = drafting(OracleHead(TARGET), options=CHAINS, max_num_batched_tokens=9, max_num_seqs=4)
    (first,) = found.add(PROMPT, greedy())
    found.scheduler.limits_of, limits = (lambda requests: [0] * len(requests)), found.scheduler.limits_of
    found.step()
    (second,) = found.add(PROMPT, greedy())
    found.step()
    found.scheduler.limits_of = limits
    drain(found)
    assert found.num_failed_drafts == 0 and all_accepted([first, second])


def test_texts_that_part_at_the_end_of_a_page_leave_a_gap_of_one_page():
    found = drafting(OracleHead(TARGET, strict=False), options=CHAINS)
    run(found, [(PROMPT, greedy())])
    (request,) = found.add([*PROMPT[:8], 7, 7], greedy())
    found.step()
    assert found.drafter._texts[request.id].skew == 4
    drain(found)
    assert found.num_failed_drafts == 0


def test_a_prefix_that_only_the_target_has_is_a_gap():
    """The head saw nothing of the first places, and drafts from what it sees; strict oracles would fail."""
    found = drafting(OracleHead(TARGET, strict=False), options=CHAINS)
    run(found, [(PROMPT, greedy())])
    found.drafter.cache.pool.forget_all()
    (request,) = run(found, [(PROMPT, greedy())])
    assert request.stats.per_step_drafted
    assert not all_accepted([request])
    # What was read behind a gap is nobody else's: with the target's pages gone, all is read again, and seen whole.
    found.cache.pool.forget_all()
    found.drafter.head.strict = True
    (request,) = run(found, [(PROMPT, greedy())])
    assert all_accepted([request])


def test_texts_that_differ_in_their_first_token_share_nothing():
    """Row 0 joins token 1 with the state of token 0."""
    found = drafting(options=CHAINS)
    assert all_accepted(run(found, [([token, *PROMPT[1:]], greedy()) for token in (1, 2, 3)]))
    assert all_accepted(run(found, [([token, *PROMPT[1:]], greedy()) for token in (4, 2, 1)]))


def test_steps_without_a_draft_leave_no_hole():
    found = drafting(options=CHAINS, k=3)
    (request,) = found.add(PROMPT, greedy(24))
    limits = found.scheduler.limits_of
    for step in range(40):
        found.scheduler.limits_of = limits if step % 3 else lambda requests: [0] * len(requests)
        found.step()
    assert not found.has_work and found.num_failed_drafts == 0
    assert request.stats.per_step_accepted == request.stats.per_step_drafted != []


def test_a_pass_that_was_not_observed_costs_drafts_and_no_more():
    found = drafting(OracleHead(TARGET, strict=False), options=CHAINS, k=3)
    (request,) = found.add(PROMPT, greedy(24))
    observe = found.drafter.observe
    for step in range(40):
        found.drafter.observe = observe if step != 2 else lambda steps, taps: None
        found.step()
        found.drafter.cache.check()
    assert not found.has_work and found.num_failed_drafts == 0
    assert tuple(request.output) == oracle(TARGET.logits_of, PROMPT, greedy(24))
    assert len(request.stats.per_step_drafted) > 3


def test_a_reduced_vocabulary_is_drawn_from_and_spelt_in_the_target_s_ids():
    found = drafting(OracleHead(TARGET, draft_ids=[1, 2, 4, 7]), k=3)
    found.drafter.propose, ask = (
        lambda *asked: seen.extend(ask(*asked)) or seen[-len(asked[0]) :],
        found.drafter.propose,
    )
    seen: list[Any] = []
    run(found, [(PROMPT[: 2 + n], SamplingParams(max_tokens=12)) for n in range(6)])
    drawn = [draft for draft in seen if draft.probs is not None]
    assert len(drawn) > 10 and all(token in (1, 2, 4, 7) for draft in seen for token in draft.tokens)
    for draft in drawn:
        assert torch.allclose(draft.probs.sum(1), torch.ones(len(draft), dtype=draft.probs.dtype), atol=1e-6)
        assert not bool(draft.probs[:, [0, 3, 5, 6]].any()) and draft.probs.shape[1] == NUM_IDS


def test_processed_requests_draft_as_the_target_chooses():
    """A chain of its own choices after penalties and biases, not a tree of raw probabilities."""
    params = greedy(18, repetition_penalty=1.5, logit_bias={3: -100.0, 5: 1.0})
    assert all_accepted(run(drafting(), [(PROMPT, params)]))


def test_a_head_among_others():
    found = engine(
        TARGET,
        lambda setting: FirstOfDrafter([NgramDrafter(NgramOptions()), Eagle3Drafter(OracleHead(TARGET), setting)]),
        k=5,
    )
    requests = run(found, [(PROMPT[: 2 + n], greedy()) for n in range(4)])
    assert sum(sum(r.stats.per_step_accepted) for r in requests) > 30


@pytest.mark.parametrize("seed", [None, 5])
def test_heads_in_one_list_by_config(seed):
    """Each sees the rows that it asked for, whichever of them drafts."""
    heads = [
        {"method": name, "model": untrained_head(name, 2, NUM_IDS, 2), "num_speculative_tokens": 2 + i}
        for i, name in enumerate(("eagle3", "medusa"))
    ]
    for order in (heads, heads[::-1]):
        found = engine(TARGET, registry.parse({"method": "first_of", "drafters": ["ngram", *order]}).build, k=6)
        assert found.drafter.taps == (0, 1)
        params = SamplingParams(max_tokens=14, seed=seed)
        requests = run(found, [(PROMPT[: 2 + n], params if n % 2 else greedy()) for n in range(8)])
        assert all(r.stats.per_step_drafted for r in requests)


def test_states_that_are_not_numbers_cost_drafts_and_no_request():
    class Broken(OracleHead):
        def logits(self, hidden_TD):
            return super().logits(hidden_TD) * torch.nan

    for params in (greedy(12), SamplingParams(max_tokens=12)):
        for options in (CHAINS, None):
            run(drafting(Broken(TARGET), options=options), [(PROMPT, params)])


def test_a_head_that_fails_once_costs_drafts_and_no_more():
    class Faulty(OracleHead):
        num_calls = 0

        def __call__(self, *args):
            self.num_calls += 1
            if self.num_calls in (1, 6, 7):
                raise RuntimeError("a head's own mistake")
            return self.forward(*args)

    found = drafting(Faulty(TARGET, strict=False), options=CHAINS, k=3)
    requests = [found.add(PROMPT[: 3 + n], greedy(24))[0] for n in range(3)]
    drain(found)
    assert found.num_failed_drafts == 3
    for n, request in enumerate(requests):
        assert tuple(request.output) == oracle(TARGET.logits_of, PROMPT[: 3 + n], greedy(24))
        assert len(request.stats.per_step_drafted) > 3


def test_options_are_checked():
    for odd in ({"tree_width": 0}, {"tree_depth": 64}, {"quantization": "int3"}, {"draft_sample_method": "best"}):
        with pytest.raises(OptionError, match=next(iter(odd))):
            Eagle3Options(**odd)
    with pytest.raises(DraftError, match="--draft-model"):
        engine(TARGET, registry.parse({"method": "eagle3"}).build)
    with pytest.raises(DraftError, match="for method 'medusa', not 'eagle3'"):
        engine(TARGET, registry.parse({"method": "eagle3", "model": untrained_head("medusa", 2, 8, 2)}).build)
    with pytest.raises(DraftError, match="hidden size"):
        engine(TARGET, registry.parse({"method": "eagle3", "model": untrained_head("eagle3", 3, 8, 2)}).build)


def test_block_verification_gets_chains():
    found = drafting(rule="block")
    assert not found.drafter.trees
    assert all_accepted(run(found, [(PROMPT, greedy()), (PROMPT, SamplingParams(max_tokens=12))]))
