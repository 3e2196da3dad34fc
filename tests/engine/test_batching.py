"""A request's text does not depend on who else is there: company, order and time of arrival, pages, chunks, prefixes.

The schedules of the last test are random, with fixed seeds; a failure names its seed.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pilotfish.decoding.draft import Draft
from pilotfish.decoding.noise import fold
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.engine.controller import Fixed
from pilotfish.engine.curve import CostCurve
from pilotfish.models.load import Loaded
from tests.adversaries import adversaries, foresight, method_config, random_trees
from tests.fakes import TableModel, drain, engine, oracle, run

MODEL = TableModel(16, order=2, num_phases=5, eos={15})
DRAFT = Loaded(TableModel(16, order=1, seed=3), None)
MIXED = [
    ([3, 1, 4], SamplingParams(temperature=0, max_tokens=24)),
    ([1, 2, 3] * 6, SamplingParams(temperature=0, max_tokens=7, frequency_penalty=0.7)),
    ([9], SamplingParams(seed=5, max_tokens=17, ignore_eos=True)),
    ([2, 7] * 8, SamplingParams(seed=5, temperature=1.7, top_k=6, max_tokens=12, logprobs=2)),
    ([5] * 9, SamplingParams(seed=6, top_p=0.8, max_tokens=1)),
    (list(range(15)) * 2, SamplingParams(seed=7, repetition_penalty=1.2, max_tokens=20)),
    ([8, 8, 1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, min_tokens=3)),
    ([3, 1, 4], SamplingParams(seed=8, min_p=0.05, max_tokens=19, logit_bias={3: 2.0})),
]


def expected(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    return oracle(MODEL.logits_of, prompt, params, eos=MODEL.info.eos_ids)


ALONE = [expected(*case) for case in MIXED]


CHAINS = ["none", "ngram", "draft_model", "staged", "layer_skip", "always right", "random", "sampled chain"]


def build(name: str) -> Any:
    if name in registry.methods():
        return registry.parse(method_config(name, DRAFT)).build
    return lambda _setting: adversaries(MODEL)[name]()


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("name", ["none", "ngram", "draft_model", "sampled trees", "right and faulty"])
def test_a_batch_gives_each_request_the_text_it_gets_alone(name, order):
    indices = list(range(8))
    random.Random(order).shuffle(indices)
    found = engine(MODEL, build(name), k=4, max_num_seqs=(16, 8, 3, 2)[order])
    requests: dict[int, Request] = {}
    gap = order  # 0: all at once; otherwise one after that many steps
    for i in indices:
        requests[i] = found.add(*MIXED[i])[0]
        for _ in range(gap):
            found.step()
            found.scheduler.check()
    drain(found)
    assert [tuple(requests[i].output) for i in range(8)] == ALONE


def test_without_seeds_too_where_the_coins_are_the_same():
    """A request's coins are its own; the drafts it gets in company are those it gets alone."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    drafter = registry.parse(method_config("draft_model", DRAFT)).build
    alone = [run(engine(MODEL, drafter, entropy=lambda i=i: 100 + i), [i, 3], params) for i in range(6)]
    coins = iter(range(100, 106))
    together = engine(MODEL, drafter, entropy=lambda: next(coins))
    requests = [together.add([i, 3], params)[0] for i in range(6)]
    drain(together)
    assert [tuple(r.output) for r in requests] == alone
    assert len(set(alone)) == 6


@pytest.mark.parametrize("name", ["none", "always right", "random trees", "draft_model"])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_prompts_in_chunks(name, num_rows):
    for (prompt, params), text in zip(MIXED, ALONE, strict=True):
        found = engine(MODEL, build(name), max_num_batched_tokens=num_rows, max_num_seqs=1)
        assert run(found, prompt, params) == text


@pytest.mark.parametrize("name", ["none", "always right", "random trees", "draft_model", "suffix"])
def test_preemption(name):
    """Pages for one long text only: the younger requests give theirs back again and again."""
    found = engine(MODEL, build(name), k=6, num_pages=13, enable_prefix_caching=False)
    requests = [found.add(*case)[0] for case in MIXED]
    drain(found)
    assert found.scheduler.num_preemptions > 0
    assert [tuple(r.output) for r in requests] == ALONE


def test_an_abort_in_the_middle_disturbs_nobody():
    for at in range(6):
        found = engine(MODEL, random_trees(16, MODEL.law), k=5, num_pages=24)
        requests = [found.add(*case)[0] for case in MIXED]
        for _ in range(at):
            found.step()
        before = found.cache.pool.num_held
        for request in requests[::3]:
            had = tuple(request.output)
            event = found.abort(request)
            assert event.finish == request.finish
            assert tuple(request.output) == had
        assert found.cache.pool.num_held <= before
        found.scheduler.check()
        drain(found)
        for i, request in enumerate(requests):
            if i % 3 or request.finish != "abort":
                assert tuple(request.output) == ALONE[i]
            else:
                assert tuple(request.output) == ALONE[i][: request.num_output]


# -- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", [True, False])
def test_the_same_prompt_again_is_not_computed_again(sharing):
    model = TableModel(16, order=2, num_phases=5)
    found = engine(model, foresight(model), enable_prefix_caching=sharing)
    prompt, params = [(3 * i) % 16 for i in range(40)], SamplingParams(temperature=0, max_tokens=9)
    texts, rows = [], []
    for _ in range(3):
        before = model.num_rows
        texts.append(run(found, prompt, params))
        rows.append(model.num_rows - before)
    longer = [*prompt, *texts[0], 1, 2, 3]  # the next turn of a conversation
    texts.append(run(found, longer, params))
    assert texts[:3] == [oracle(model.logits_of, prompt, params)] * 3
    assert texts[3] == oracle(model.logits_of, longer, params)
    assert (rows[1] == rows[2] == rows[0] - 36) if sharing else (rows[0] == rows[1] == rows[2])


def test_prompts_that_end_at_a_page_s_end():
    """A hit leaves at least one token to compute, and what lies in a shared page is never written again."""
    found = engine(MODEL, foresight(MODEL), k=3)
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
    for length in [8, 7, 8, 9, 4, 5, 12, 8, 3, 4]:
        prompt = [(5 * i) % 13 for i in range(length)]
        assert run(found, prompt, params) == expected(prompt, params)


def test_running_requests_share_pages_and_go_different_ways():
    prompt = [(3 * i) % 16 for i in range(24)]
    found = engine(MODEL, random_trees(16, MODEL.law), k=6)
    cases = [(prompt, SamplingParams(seed=i, max_tokens=12, ignore_eos=True)) for i in range(4)]
    requests = []
    for case in cases:  # the first one's pages are known when the next ones come
        requests += found.add(*case)
        found.step()
    shared = sum(n > 1 for n in found.cache.pool._holders)
    assert shared >= 5
    drain(found)
    assert [tuple(r.output) for r in requests] == [expected(*case) for case in cases]


def test_several_choices():
    """The n-th choice is the request whose seed is folded n times: the first is the one without ``n``."""
    params = SamplingParams(seed=21, n=4, max_tokens=10)
    found = engine(MODEL, build("draft_model"), k=3)
    requests = found.add([4, 2], params)
    drain(found)
    alone = [SamplingParams(seed=fold(21, i), max_tokens=10) for i in range(4)]
    assert [tuple(r.output) for r in requests] == [expected([4, 2], own) for own in alone]
    assert len({tuple(r.output) for r in requests}) == 4


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "always wrong"])
def test_a_measured_k_changes_nothing(name, rule, monkeypatch):
    """Whatever passes are said to cost: nothing pays, everything pays, and what this machine really takes."""
    for points in ({1: 1.0, 2: 9.0}, {1: 1.0, 16: 1.0}, {1: 1e-4, 16: 2e-4}):
        monkeypatch.setattr("pilotfish.engine.engine.measured", lambda _, points=points: CostCurve(dict(points)))
        found = engine(MODEL, build(name), k="auto", rule=rule)
        requests = [found.add(*case)[0] for case in MIXED]
        drain(found)
        assert [tuple(r.output) for r in requests] == ALONE
        assert not found.controller._own


# -- everything at once ---------------------------------------------------------------------------------------------


class Whimsical(Fixed):
    """A controller that changes its mind: any limit, and any cut of what was chosen, not drawn."""

    def __init__(self, source: random.Random):
        super().__init__(9)
        self.source = source

    def limits(self, requests: Sequence[Request]) -> list[int]:
        return [self.source.randrange(9) for _ in requests]

    def cut(self, arm: int, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        return [d.first(self.source.randrange(len(d) + 1)) if d.probs is None else d for d in drafts]


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules(seed):
    source = random.Random(seed)
    rule = source.choice(["rejection", "block"])
    names = [*registry.methods(), *adversaries(MODEL)]
    num_seqs = source.choice([1, 2, 5, 8])
    found = engine(
        MODEL,
        build(source.choice([name for name in names if rule == "rejection" or name in CHAINS])),
        k=source.choice([1, 2, 5, 8, 20]),
        rule=rule,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=source.choice([num_seqs, num_seqs + 3, 30, 500]),
        num_pages=source.choice([14, 20, 60]),
        enable_prefix_caching=source.random() < 0.7,
    )
    if source.random() < 0.4:
        found.controller = Whimsical(source)
        found.scheduler.limits_of = found.controller.limits
    waiting = [MIXED[source.randrange(8)] for _ in range(14)]
    running: list[tuple[int, Request]] = []
    while waiting or found.has_work:
        for _ in range(source.choice([0, 0, 1, 3])):
            if waiting:
                case = waiting.pop()
                running.append((MIXED.index(case), found.add(*case)[0]))
        if running and source.random() < 0.08:
            found.abort(source.choice(running)[1])
        found.step()
        found.scheduler.check()
    assert found.cache.pool.num_held == 0
    assert len(running) == 14
    for i, request in running:
        whole = request.finish != "abort"
        assert tuple(request.output) == (ALONE[i] if whole else ALONE[i][: request.num_output]), (seed, i)
