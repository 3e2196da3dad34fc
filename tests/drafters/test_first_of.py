"""First of several: who is asked, for what, and how the list is written."""

from collections.abc import Sequence
from typing import Any

import pytest

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.base import Drafter
from pilotfish.drafters.first_of import FirstOfDrafter
from pilotfish.drafters.registry import parse
from pilotfish.errors import OptionError
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import Loaded
from tests.adversaries import foresight
from tests.fakes import TableModel, drain, engine, run
from tests.models.tiny import tiny_model


class Only(Drafter):
    """Has an idea for some texts: those whose last token is among ``known``. Notes every call."""

    def __init__(self, name: int, known: Sequence[int], *, taps: Sequence[int] = (), trees: bool = False):
        self.name, self.known, self.taps, self.trees = name, known, taps, trees
        self.asked: list[Any] = []
        self.seen: list[Any] = []
        self.released: list[Any] = []

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        self.asked.append(([r.tokens[-1] for r in requests], list(limits)))
        return [
            chain([self.name] * k) if r.tokens[-1] in self.known else EMPTY
            for r, k in zip(requests, limits, strict=True)
        ]

    def observe(self, steps: Any, taps: Any) -> None:
        self.seen.append((len(steps), set(taps)))

    def release(self, request: Any) -> None:
        self.released.append(request.id)


class Text:
    def __init__(self, last: int):
        self.tokens, self.id = [0, last], str(last)


def test_the_first_with_an_idea_drafts_and_the_others_are_asked_for_the_rest_only():
    a, b, c = Only(11, [1]), Only(12, [1, 2]), Only(13, [1, 2, 3])
    found = FirstOfDrafter([a, b, c], [5, 2, 5])
    drafts = found.propose([Text(1), Text(2), Text(3), Text(4)], [3, 4, 5, 6])
    assert [d.tokens for d in drafts] == [(11,) * 3, (12,) * 2, (13,) * 5, ()]
    assert [d.kind for d in drafts[:3]] == [(0, None), (1, None), (2, None)]  # acceptance is counted for each
    assert a.asked == [([1, 2, 3, 4], [3, 4, 5, 5])]
    assert b.asked == [([2, 3, 4], [2, 2, 2])]
    assert c.asked == [([3, 4], [5, 5])]
    found.propose([Text(1)], [3])
    assert len(a.asked) == 2 and len(b.asked) == 1  # nothing left to ask it


def test_all_members_see_all_that_was_kept():
    model = TableModel(6)
    a, b = Only(1, [], taps=(1,)), Only(2, range(6), taps=(0, 1))
    found = FirstOfDrafter([a, b])
    assert found.taps == (0, 1)
    run(engine(model, found), [1, 2, 3], SamplingParams(temperature=0, max_tokens=6))
    assert a.seen == b.seen and a.released == b.released != []
    assert all(taps == {0, 1} for _, taps in a.seen)


def test_it_may_branch_if_a_member_may():
    assert FirstOfDrafter([Only(1, []), Only(2, [], trees=True)]).trees
    assert not FirstOfDrafter([Only(1, []), Only(2, [])]).trees
    suffix_first = parse({"method": "first_of", "drafters": "suffix,ngram"})
    assert engine(TableModel(6), suffix_first.build).drafter.trees
    assert not engine(TableModel(6), suffix_first.build, rule="block").drafter.trees


@pytest.mark.parametrize(
    "drafters",
    [
        "suffix, ngram",
        ["suffix", "ngram"],
        ("suffix", {"method": "ngram"}),
        '["suffix", {"method": "ngram"}]',
        ["suffix", '{"prompt_lookup_min": 2}'],
    ],
)
def test_ways_to_write_the_list(drafters):
    found = engine(TableModel(6), parse({"method": "first_of", "drafters": drafters}).build).drafter
    assert found.describe() == "suffix, else ngram"


def test_members_have_options_of_their_own():
    config = [{"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}, "suffix"]
    found = engine(TableModel(6), parse({"method": "first_of", "drafters": config}).build).drafter
    assert found.members[0].options.longest == 3 and found.limits == (2, 63)


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ("ngram,sufix", "unknown method 'sufix'; did you mean 'suffix'"),
        ("ngram,first_of", "first_of cannot be one of its own drafters"),
        ([{"method": "first_of", "drafters": ["ngram"]}], "first_of cannot be one of its own drafters"),
        (["ngram", "none"], "'none' never drafts"),
        ([], "must be a list of methods"),
        ({"method": "ngram"}, "must be a list of methods"),
        ([5], "must be a method's name or a config"),
        ('["ngram"', "drafters is not JSON"),
        ([{"method": "ngram", "promt_lookup_max": 3}], "did you mean 'prompt_lookup_max'"),
        ([{"method": "ngram", "rejection_sample_method": "block"}], "rejection_sample_method is the target's"),
        ([{"method": "ngram", "num_speculative_tokens": "auto"}], "num_speculative_tokens in drafters must be a whole"),
    ],
)
def test_lists_that_make_no_sense_are_refused(drafters, message):
    with pytest.raises(OptionError, match=message):
        parse({"method": "first_of", "drafters": drafters})


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5}], ids=["greedy", "seeded"])
def test_the_text_is_the_target_s(params):
    model = HuggingFaceLM(tiny_model(), self_check=False)
    draft = Loaded(HuggingFaceLM(tiny_model(seed=1, num_hidden_layers=1), self_check=False), None)
    drafters = [{"method": "ngram", "num_speculative_tokens": 2}, {"method": "draft_model", "model": draft}]
    fast = engine(model, parse({"method": "first_of", "drafters": drafters}).build, k=5)
    prompts = [[5, 6, 7, 8] * 3, [3, 1, 3, 1, 3], list(range(20))]
    params = SamplingParams(max_tokens=24, **params)
    wanted = [run(engine(model), prompt, params) for prompt in prompts]
    requests = [fast.add(prompt, params)[0] for prompt in prompts]
    drain(fast)
    assert [tuple(r.output) for r in requests] == wanted
    assert {2, 5} <= {n for r in requests for n in r.stats.per_step_drafted}  # both have drafted
    assert fast.num_failed_drafts == 0


def test_what_comes_first_hides_what_comes_later():
    """Behind a drafter that is always right, one that is always wrong does no harm; before it, it does."""
    model = TableModel(8, seed=3)
    params = SamplingParams(temperature=0, max_tokens=20)
    steps = []
    for order in ([False, True], [True, False]):
        found = engine(model, FirstOfDrafter([foresight(model, wrong=wrong) for wrong in order]), k=4)
        (request,) = found.add([1, 2], params)
        drain(found)
        steps.append(request.stats.num_steps)
    assert steps == [4, 20]
