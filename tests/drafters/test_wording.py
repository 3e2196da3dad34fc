"""A draft model with another vocabulary: what it reads, what q it carries, and that the text stays the target's."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from pilotfish.decoding.draft import EMPTY, chain
from pilotfish.decoding.sampling import SamplingParams, warp
from pilotfish.drafters import registry
from pilotfish.drafters.wording import SharedTokens
from pilotfish.models.tokenizer import Tokenizer
from tests.adversaries import Scripted
from tests.drafters.two_vocabularies import (
    DRAFT,
    MODES,
    OWN,
    PROMPT,
    TARGET,
    TARGET_TOKENS,
    config,
    drafting,
    expected,
    read,
    tokenizer_of,
    watch,
)
from tests.fakes import TableModel, drain, engine

# -- shared tokens --------------------------------------------------------------------------------------------------


def test_which_tokens_are_drafted():
    found = drafting()
    assert isinstance(found.drafter.wording, SharedTokens) and found.drafter.wording.own == OWN
    assert found.drafter.describe() == "draft, another vocabulary, 7 of 10 tokens shared, scheme intersection"


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("scheme", ["intersection", "text"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_text_is_the_target_s(mode, scheme, rule):
    found = drafting(vocabulary_scheme=scheme, rule=rule)
    seen = watch(found)
    params = [SamplingParams(**mode, max_tokens=40, ignore_eos=i % 2 == 0) for i in range(6)]
    requests = [found.add([*PROMPT, *[2] * i], one)[0] for i, one in enumerate(params)]
    drain(found)
    assert found.num_failed_drafts == 0
    assert sum(sum(request.stats.per_step_drafted) for request in requests) > 20
    assert scheme == "text" or sum(sum(request.stats.per_step_accepted) for request in requests) > 5
    for request, one in zip(requests, params, strict=True):
        if one.greedy or one.seed:
            assert tuple(request.output) == expected(request.prompt, one)
    assert 0 not in {token for _, draft in seen for token in draft.tokens}, "a special token was drafted"
    for _, draft in seen:
        assert 1 not in draft.tokens[:-1] or params[0].ignore_eos
        if scheme == "intersection":
            assert set(draft.tokens) <= set(OWN)
        else:
            assert draft.probs is None
    assert not found.drafter.cache.sequences and not found.drafter._scratch
    assert not found.drafter.wording.translator._places


@pytest.mark.parametrize("scheme", ["intersection", "text"])
def test_state_survives_preemption_chunked_prompts_and_small_caches(scheme):
    found = drafting(vocabulary_scheme=scheme, num_pages=12, max_num_batched_tokens=7, max_num_seqs=4)
    params = SamplingParams(seed=9, max_tokens=20, ignore_eos=True)
    requests = [found.add((PROMPT * 3)[: 3 + 2 * i], params)[0] for i in range(5)]
    drain(found)
    assert found.scheduler.num_preemptions > 0 and found.num_failed_drafts == 0
    assert [tuple(r.output) for r in requests] == [expected(r.prompt, params) for r in requests]
    assert sum(sum(r.stats.per_step_drafted) for r in requests) > 0


def law_of_draft(text: Sequence[int], own: Sequence[int], params: SamplingParams, output: Sequence[int]):
    """By hand: the draft's logits at what is shared, scattered to the target's ids, as `warp` makes a law of them."""
    logits_V = torch.full((10,), -torch.inf, dtype=torch.float64)
    row_V = DRAFT.logits_of(own)
    for token, mine in OWN.items():
        logits_V[token] = row_V[mine]
    return warp(logits_V[None], params, PROMPT, [output], TARGET.info.eos_ids)[0]


@pytest.mark.parametrize("mode", [{}, {"temperature": 0.7, "top_p": 0.9}, {"frequency_penalty": 0.8}], ids=str)
def test_q_is_the_draft_s_law_of_what_is_shared(mode):
    """After the text in the draft's own tokens, and its guesses in its own tokens."""
    found = drafting()
    seen = watch(found)
    without = {0: -float("inf"), 1: -float("inf")}  # `read` knows no special tokens
    params = SamplingParams(**mode, max_tokens=60, ignore_eos=True, logit_bias=without)
    for _ in range(3):
        found.add(PROMPT, params)
    drain(found)
    num_silent = num_checked = 0
    for text, draft in seen:
        own = read(text)
        assert (len(draft) == 0) == (own is None)
        num_silent += own is None
        for node, token in enumerate(draft.tokens):
            law_V = law_of_draft(own, own, params, [*text[len(PROMPT) :], *draft.tokens[:node]])
            assert torch.allclose(draft.probs[node], law_V, atol=1e-12)
            own = [*own, OWN[token]]
            num_checked += 1
    assert num_checked > 100 and num_silent > 0


def drafted_tokens(num_runs: int):
    """What is drafted first after PROMPT, and the law that was carried with it."""
    sizes = {"max_num_seqs": num_runs, "num_pages": 4 * num_runs, "max_num_batched_tokens": 20_000}
    found = drafting(k=1, **sizes, entropy=itertools.count().__next__)
    seen = watch(found)
    for _ in range(num_runs):
        found.add(PROMPT, SamplingParams(max_tokens=2))
    found.step()
    return [draft.tokens[0] for _, draft in seen if len(draft)], seen[0][1].probs[0]


def test_what_is_drawn_follows_the_q_that_is_carried():
    tokens, q_V = drafted_tokens(1500)
    assert len(tokens) == 1500
    counts, shared = Counter(tokens), [token for token in range(10) if q_V[token] > 0]
    assert set(counts) <= set(shared) == set(OWN)
    assert chisquare([counts[t] for t in shared], [1500 * float(q_V[t]) for t in shared]).pvalue > 1e-3
    whole_V = torch.softmax(DRAFT.logits_of(read(PROMPT)), 0)
    wrong_V = whole_V[shared] / whole_V[shared].sum()  # the control: ids of the target looked up in the draft's law
    assert chisquare([counts[t] for t in shared], (1500 * wrong_V).tolist()).pvalue < 1e-6


def p_value(change=lambda draft: draft, **options) -> float:
    """Of the hypothesis that the first token after PROMPT follows the target's law."""
    num_runs = 1000
    speculation = registry.parse(config(**options))

    def build(setting):
        inner = speculation.build(setting)
        found = Scripted(lambda *asked: EMPTY)
        found.propose = lambda requests, limits: [change(draft) for draft in inner.propose(requests, limits)]
        found.release = inner.release
        return found

    found = engine(
        TARGET,
        build,
        k=2,
        tokenizer=TARGET_TOKENS,
        entropy=itertools.count().__next__,
        max_num_seqs=250,
        num_pages=1500,
    )
    requests = [found.add(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))[0] for _ in range(num_runs)]
    while found.has_work:
        found.step()
    assert found.num_failed_drafts == 0
    counts = Counter(request.output[0] for request in requests)
    law_V = TARGET.law(PROMPT)
    return float(chisquare([counts[t] for t in range(10)], [num_runs * float(p) for p in law_V]).pvalue)


def test_unseeded_tokens_follow_the_target_s_law_and_a_q_that_is_not_renormalised_is_found_out():
    assert p_value() > 1e-3
    assert p_value(vocabulary_scheme="text") > 1e-3
    whole_V = torch.softmax(DRAFT.logits_of(read(PROMPT)), 0)
    kept = float(sum(whole_V[own] for own in OWN.values()))
    assert kept < 0.8, "the control would control nothing"

    def unnormalised(draft):
        return chain(draft.tokens, draft.probs * kept) if draft.probs is not None else draft

    assert p_value(unnormalised) < 1e-6


# -- what it reads --------------------------------------------------------------------------------------------------

LETTERS = "etaoinshrdlucmfw gypbvk"


def letters(order: Sequence[int]) -> Tokenizer:
    names = [character.replace(" ", "Ġ") for character in LETTERS]
    return tokenizer_of([*(names[i] for i in order), "<s>", "</s>"], [])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_twin_with_other_ids_is_always_right_and_reads_nothing_twice(mode):
    """The target under a permutation of its ids: reading, catching up and mapping are all exact, over cuts too."""
    size = len(LETTERS)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3)).tolist()  # own id -> the target's
    target = TableModel(size, order=1, num_phases=1, context=1500, name="twin")
    draft = TableModel(size, order=1, num_phases=1, context=1500)
    draft.table = target.table[:, order][:, :, order]
    params = SamplingParams(**mode, max_tokens=30)
    prompt = [(5 * i + i // 7) % size for i in range(700)]
    found = drafting(
        draft,
        letters(order),
        target=target,
        target_tokens=letters(range(size)),
        block_size=16,
        max_num_seqs=2,
        num_pages=100,
        max_model_len=1000,
    )
    request = found.add(prompt, params)[0]
    drain(found)
    if not params.penalised:  # the fake's table knows nothing of penalties, both laws do
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
    assert sum(request.stats.per_step_drafted) > 20
    if params.greedy or params.seed:
        assert tuple(request.output) == expected(prompt, params, target)
    assert draft.num_rows <= len(prompt) + 2 * 30, "what was read was read again"


def test_what_is_fixed_is_shared_between_requests():
    size = len(LETTERS)
    target, draft = (TableModel(size, order=1, context=1500, seed=seed) for seed in (0, 1))
    tokens, prompt = letters(range(size)), [(5 * i + i // 7) % size for i in range(700)]
    rows = []
    found = drafting(draft, letters(range(size - 1, -1, -1)), target=target, target_tokens=tokens, max_num_seqs=2)
    for _ in range(2):
        before = draft.num_rows
        found.add(prompt, SamplingParams(temperature=0, max_tokens=3))
        drain(found)
        rows.append(draft.num_rows - before)
    assert rows[0] > 700 > 500 > rows[1]


def test_inside_a_character_nothing_is_drafted():
    found = drafting()
    seen = watch(found)
    bias = {token: -float("inf") for token in (0, 1, 9)}
    found.add([2, 5], SamplingParams(temperature=0, max_tokens=1, logit_bias={**bias, 6: 100.0}))
    found.add([2, 5, 6], SamplingParams(temperature=0, max_tokens=3, logit_bias=bias))
    drain(found)
    drafts = {tuple(text): len(draft) for text, draft in seen}
    assert drafts.get((2, 5), 0) == 0 and drafts[2, 5, 6] > 0


def test_a_text_longer_than_the_draft_s_context_is_not_drafted():
    """In its own tokens: the fake fails an assertion if a row beyond its context is fed."""
    short = replace(DRAFT.info, context=12)
    draft = TableModel(11, order=1, num_phases=2, seed=12, eos={3})
    draft.info = short
    found = drafting(draft)
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    request = found.add(PROMPT, params)[0]
    drain(found)
    assert found.num_failed_drafts == 0 and tuple(request.output) == expected(PROMPT, params)
    assert 0 < sum(request.stats.per_step_drafted) < 30
