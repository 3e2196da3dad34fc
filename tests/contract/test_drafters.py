"""What every drafter must do, whatever it drafts: one suite over all files in pilotfish/drafters.

A new file is tested without a line here. Options without a default that works (a draft model) are supplied, by their
name, by `tests.adversaries.method_config`. The target is a table with exact probabilities, read through the pages.
"""

import copy
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from pilotfish.decoding.draft import EMPTY
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.drafters.base import Drafter, Setting
from pilotfish.errors import DraftError, OptionError
from pilotfish.models.load import Loaded
from pilotfish.paged.pages import PagePool
from tests.adversaries import FAILING, Scripted, adversaries, method_config, sampled_chain
from tests.fakes import TableModel, drain, engine, joint_law, oracle

METHODS = registry.methods()
NUM_IDS = 8
TARGET = TableModel(NUM_IDS, order=2, num_phases=3, eos={NUM_IDS - 1}, sharpness=1.2)
DRAFT = TableModel(NUM_IDS, order=1, seed=7, sharpness=1.2, name="draft")
LOOPING = [1, 2, 3, 1, 2, 3, 1, 2]  # text that repeats, so that those who copy have something to copy


def build(method: str, draft: TableModel = DRAFT) -> Callable[[Setting], Drafter]:
    return registry.parse(method_config(method, Loaded(draft, None))).build


class Watched(Drafter):
    """Checks every call of the drafter inside, and counts what it drafts."""

    def __init__(self, inner: Drafter, num_ids: int):
        self.inner, self.num_ids, self.num_drafted = inner, num_ids, 0
        self.trees, self.taps = inner.trees, inner.taps

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Any]:
        before = [(list(r.tokens), r.text, r.finish, len(r.logprobs)) for r in requests]
        drafts = self.inner.propose(requests, limits)
        assert [(list(r.tokens), r.text, r.finish, len(r.logprobs)) for r in requests] == before, (
            "requests are read only"
        )
        assert len(drafts) == len(requests)
        for request, draft, limit in zip(requests, drafts, limits, strict=True):
            assert len(draft) <= limit
            assert self.trees or draft.is_chain
            assert all(isinstance(token, int) and 0 <= token < self.num_ids for token in draft.tokens)
            if draft.probs is not None:
                assert not request.params.greedy and draft.probs.shape == (len(draft), self.num_ids)
                assert torch.allclose(draft.probs.sum(1), torch.ones(len(draft), dtype=draft.probs.dtype), atol=1e-6)
                assert bool((draft.probs[range(len(draft)), list(draft.tokens)] > 0).all()), "drawn, yet impossible"
                assert bool((draft.probs >= 0).all())
            self.num_drafted += len(draft)
        return drafts

    def observe(self, steps: Any, taps: Any) -> None:
        assert set(taps) == set(self.taps)
        self.inner.observe(steps, taps)

    def release(self, request: Request) -> None:
        self.inner.release(request)


def watched(method: str, **options: Any) -> Any:
    found = engine(TARGET, lambda setting: Watched(build(method)(setting), NUM_IDS), **options)
    assert isinstance(found.drafter, Watched)
    return found


def mixed(greedy: bool, seeded: bool, num_requests: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of different lengths, parameters of all kinds."""
    shaping = [
        {},
        {"top_p": 0.8},
        {"top_k": 3},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "min_tokens": 6},
    ]
    return [
        (
            (LOOPING * 3)[: 3 + 2 * i],
            SamplingParams(
                temperature=0 if greedy else 1,
                max_tokens=9 + i,
                seed=1000 + i if seeded else None,
                ignore_eos=i % 2 == 0,
                **shaping[i % len(shaping)],
            ),
        )
        for i in range(num_requests)
    ]


def expected(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    return oracle(TARGET.logits_of, prompt, params, eos=TARGET.info.eos_ids)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_admissible(method, greedy, num_requests):
    """Without seeds, so that those who draw do draw."""
    engine = watched(method)
    for prompt, params in mixed(greedy, False, num_requests):
        engine.add(prompt, params)
    drain(engine)
    assert engine.num_failed_drafts == 0
    assert (engine.drafter.num_drafted > 0) == (method != "none")


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_the_target_s(method, greedy, k):
    engine = watched(method, k=k)
    cases = mixed(greedy, True, 8)
    requests = [engine.add(prompt, params)[0] for prompt, params in cases]
    drain(engine)
    assert [tuple(r.output) for r in requests] == [expected(*case) for case in cases]
    assert engine.num_failed_drafts == 0


@pytest.mark.parametrize("method", METHODS)
def test_state_survives_preemption_and_chunked_prompts(method):
    engine = watched(method, k=4, num_pages=9, max_num_batched_tokens=7, max_num_seqs=4)
    cases = mixed(False, True, 8)
    requests = [engine.add(prompt, params)[0] for prompt, params in cases]
    drain(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [tuple(r.output) for r in requests] == [expected(*case) for case in cases]
    assert engine.num_failed_drafts == 0


@pytest.mark.parametrize("method", METHODS)
def test_requests_may_vanish_and_drafts_may_be_dropped(method):
    """Some requests are aborted on the way; some drafts are never fed; some steps the drafter is not asked at all."""
    engine = watched(method, k=4)
    cases = mixed(False, True, 8)
    requests = [engine.add(prompt, params)[0] for prompt, params in cases]
    ask, limits = engine.drafter.propose, engine.scheduler.limits_of
    for step in range(60):
        engine.drafter.propose = ask if step % 3 else lambda requests, limits: ask(requests, limits) and []
        engine.scheduler.limits_of = limits if step % 4 else lambda requests: [0] * len(requests)
        engine.step()
        engine.scheduler.check()
        if step < 4:
            engine.abort(requests[2 * step])
    assert not engine.has_work and engine.cache.pool.num_held == 0
    assert [tuple(r.output) for r in requests[1::2]] == [expected(*case) for case in cases[1::2]]


@pytest.mark.parametrize("method", METHODS)
def test_asked_twice_it_answers_twice(method):
    """As after a pass of the target that failed: the same text is proposed for again."""
    engine = watched(method, k=4)
    ask = engine.drafter.propose

    def ask_twice(requests: Sequence[Request], limits: Sequence[int]) -> list[Any]:
        first, second = ask(requests, limits), ask(requests, limits)
        assert [draft.tokens for draft in first] == [draft.tokens for draft in second]
        return second

    engine.drafter.propose = ask_twice
    cases = mixed(False, True, 5) + mixed(False, False, 5)
    requests = [engine.add(prompt, params)[0] for prompt, params in cases]
    drain(engine)
    assert engine.num_failed_drafts == 0
    assert [tuple(r.output) for r in requests[:5]] == [expected(*case) for case in cases[:5]]


@pytest.mark.parametrize("method", METHODS)
def test_a_guessed_tail_leaves_nothing_behind(method):
    """What a drafter is shown as guessed (`Request.num_guessed`) may be other tokens the next time."""
    engine = watched(method, k=4)
    params = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
    (request,) = engine.add(LOOPING, params)
    while engine.has_work:
        engine.step()
        for tail in ([4], [4, 5], [6, 6, 6], [1]):
            if not request.finish:
                shadow = copy.copy(request)
                shadow.tokens, shadow.num_guessed = [*request.tokens, *tail], len(tail)
                engine.drafter.propose([shadow], [2])
    assert engine.num_failed_drafts == 0
    assert tuple(request.output) == expected(LOOPING, params)


@pytest.mark.parametrize("method", METHODS)
def test_as_the_inner_drafter_of_a_draft_model(method):
    if method == "none":
        pytest.skip("drafts nothing")
    inner = method_config(method, Loaded(DRAFT, None))
    outer = registry.parse({"method": "staged", "model": Loaded(DRAFT, None), "inner": inner})
    alone = registry.parse({"method": "draft_model", "model": Loaded(DRAFT, None)})
    cases = mixed(False, True, 6)
    texts = []
    for speculation in (outer, alone):
        try:
            found = engine(TARGET, lambda setting, it=speculation: Watched(it.build(setting), NUM_IDS), k=6)
        except DraftError as error:
            if "hidden states" not in str(error):  # a draft model hands none out
                raise
            pytest.skip(str(error))
        requests = [found.add(prompt, params)[0] for prompt, params in cases]
        drain(found)
        assert found.num_failed_drafts == 0
        texts.append([(tuple(r.output), r.stats.per_step_drafted, r.stats.per_step_accepted) for r in requests])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", METHODS)
def test_release_forgets_everything(method):
    engine = watched(method)
    engine._next_id = 10**9  # ids that nothing else is called
    for round_ in range(2):
        requests = [r for prompt, params in mixed(False, bool(round_), 5) for r in engine.add(prompt, params)]
        engine.step()
        engine.step()
        assert method in ("none", "layer_skip") or found_in(engine.drafter.inner, requests), "the search finds nothing"
        engine.abort(requests[0])
        drain(engine)
        assert found_in(engine.drafter.inner, requests) == []


def found_in(drafter: Drafter, requests: Sequence[Request]) -> list[str]:
    """Where, in a drafter's own state, a request or its id is still to be found."""
    ids, found, seen = {r.id for r in requests}, list[str](), set[int]()
    waiting: deque[tuple[str, Any]] = deque([("drafter", drafter)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (torch.Tensor, PagePool, TableModel, Setting)):
            continue  # a page pool remembers texts on purpose, within its size
        seen.add(id(value))
        if isinstance(value, Request) or (isinstance(value, str) and value in ids):
            found.append(path)
        elif isinstance(value, Mapping):
            waiting += [
                (f"{path}[{key!r}]", part) for item in value.items() for key, part in ((item[0], x) for x in item)
            ]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += [(f"{path}[...]", part) for part in value]
        elif type(value).__module__.startswith("pilotfish"):
            names = [f.name for f in fields(value)] if is_dataclass(value) else [*getattr(value, "__dict__", {})]
            names += [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
            waiting += [(f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    return found


# -- the law, where nothing fixes the text ---------------------------------------------------------------------------

NUM_RUNS = 1500
SMALL = TableModel(4, order=2, seed=4, sharpness=1.2)
SMALL_DRAFT = TableModel(4, order=1, seed=5, sharpness=1.2, name="small draft")
PROMPT = (1, 2, 1, 2, 1)


def p_value(
    make: Callable[[Setting], Drafter], rule: str, num_runs: int = NUM_RUNS, *, max_num_seqs: int = 250
) -> float:
    """Of the hypothesis that the first two of four tokens follow the target's joint law."""
    options = {"k": 3, "rule": rule, "max_num_seqs": max_num_seqs, "num_pages": 1000}
    found = engine(SMALL, make, entropy=itertools.count().__next__, **options)
    requests = [found.add(PROMPT, SamplingParams(max_tokens=4))[0] for _ in range(num_runs)]
    while found.has_work:
        found.step()
    assert found.num_failed_drafts == 0
    counts = Counter(tuple(request.output[:2]) for request in requests)
    law = joint_law(SMALL, PROMPT, 2)
    return float(chisquare([counts[pair] for pair in law], [num_runs * p for p in law.values()]).pvalue)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_unseeded_tokens_follow_the_target_s_law(method, rule):
    try:
        assert p_value(build(method, SMALL_DRAFT), rule) > 1e-3
    except OptionError:
        assert rule == "block"  # refused for trees


def test_a_draft_model_that_breaks_down_after_some_tokens_is_no_bias():
    """Its law is NaN behind token 3. Drafts that drew a 3 must not be dropped for it, or the text would say it less.

    One request at a time, so that no draft is lost to another request's trouble.
    """
    broken = TableModel(4, order=1, seed=5, sharpness=1.2, poison={3})
    assert p_value(build("draft_model", broken), "rejection", 700, max_num_seqs=1) > 1e-3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_drafter_that_lies_about_its_law_is_found_out(rule):
    """The control: the same test sees a q that is three tenths uniform."""
    honest, liar = (sampled_chain(SMALL_DRAFT.law, claim=claim) for claim in (lambda q: q, lambda q: 0.7 * q + 0.075))
    assert p_value(lambda _: honest, rule) > 1e-3
    assert p_value(lambda _: liar, rule) < 1e-6


def test_a_drafter_that_drops_what_it_drew_is_found_out():
    """The control of the one above: to drop a draft for the token that was drawn is a bias, however honest its q."""
    honest = sampled_chain(SMALL_DRAFT.law)
    unwanted = int((SMALL_DRAFT.law(PROMPT) - SMALL.law(PROMPT)).argmax())
    picky = Scripted(lambda *asked: EMPTY if (draft := honest.script(*asked)).tokens[0] == unwanted else draft)
    assert p_value(lambda _: picky, "rejection") < 1e-6


@pytest.mark.parametrize("name", [name for name in adversaries(SMALL) if name not in FAILING])
def test_whatever_is_drafted_the_law_stands(name):
    assert p_value(lambda _: adversaries(SMALL)[name](), "rejection", 500) > 1e-3
