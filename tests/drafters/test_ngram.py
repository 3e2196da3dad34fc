"""Prompt lookup: which place is copied from, how far, and what a step costs."""

from collections import Counter

import pytest

from pilotfish.decoding.draft import EMPTY
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.drafters.ngram import NgramDrafter, NgramOptions, _Index
from pilotfish.errors import OptionError
from tests.fakes import TableModel, drain, engine, oracle


def request(tokens, reference=(), name="r") -> Request:
    return Request(name, tuple(tokens), SamplingParams(), 0, "rejection", 10_000, reference=tuple(reference))


def draft(tokens, limit=4, reference=(), **options) -> tuple[int, ...]:
    (found,) = NgramDrafter(NgramOptions(**options)).propose([request(tokens, reference)], [limit])
    assert found.probs is None and found.is_chain
    return found.tokens


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], (3, 4, 5, 9)),  # what followed 1 2
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], (5, 6, 1, 2)),  # the latest place
        ([7, 1, 2, 3, 4, 8, 1, 2, 5, 6, 7, 1, 2], (3, 4, 8, 1)),  # but a longer match comes first
        ([1, 2, 3, 1, 2, 3, 1, 2], (3, 1, 2, 3)),  # a loop goes on, beyond what is there
        ([5, 5, 5], (5, 5, 5, 5)),
        ([1, 2, 3, 4, 5], ()),  # nothing repeats
        ([1, 2, 1], ()),  # one token is too short a match
        ([1], ()),
    ],
)
def test_what_is_copied(tokens, wanted):
    assert draft(tokens) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 2}, (5, 6, 7)),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 2}, (4, 8, 2)),
        ({"prompt_lookup_max": 1, "prompt_lookup_min": 1}, (9, 1, 2)),
        ({"prompt_lookup_max": 9, "prompt_lookup_min": 4}, ()),
    ],
)
def test_the_bounds_of_a_match(options, wanted):
    tokens = [1, 2, 3, 4, 8, 2, 3, 5, 6, 7, 3, 9, 1, 2, 3]
    assert draft(tokens, 3, **options) == wanted


@pytest.mark.parametrize("limit", [1, 2, 7, 63])
def test_as_many_as_are_wanted(limit):
    assert draft([1, 2, 3, 1, 2], limit) == tuple(([3, 1, 2] * 30)[:limit])


def test_a_reference_is_the_better_source_for_matches_of_the_same_length():
    assert draft([1, 2, 3, 1, 2], reference=[7, 1, 2, 8, 9]) == (8, 9)  # it ends there: nothing to go on with
    assert draft([4, 1, 2, 3, 4, 1, 2], reference=[7, 1, 2, 8, 9]) == (3, 4, 1, 2)  # a longer match at home
    assert draft([6, 6, 1, 2], reference=[7, 1, 2, 8, 9]) == (8, 9)


def test_a_text_that_grows_is_looked_up_as_if_it_were_new():
    """Token by token and in leaps, the tables give what a fresh one gives."""
    text = [(i * i) % 7 for i in range(120)]
    for leap in (1, 3, 10):
        drafter, growing = NgramDrafter(), request(text[:5])
        for end in range(5, 120, leap):
            growing.tokens = text[:end]
            (found,) = drafter.propose([growing], [6])
            assert found.tokens == draft(text[:end], 6)


def test_guessed_tokens_are_matched_but_not_remembered():
    drafter, shown = NgramDrafter(), request([1, 2, 3, 9, 1])
    shown.tokens, shown.num_guessed = [1, 2, 3, 9, 1, 2], 1
    assert drafter.propose([shown], [2])[0].tokens == (3, 9)
    shown.tokens, shown.num_guessed = [1, 2, 3, 9, 1, 8, 7, 1], 3
    assert drafter.propose([shown], [2]) == [EMPTY]
    shown.tokens, shown.num_guessed = [1, 2, 3, 9, 1, 8], 0
    assert drafter.propose([shown], [2]) == [EMPTY]  # 1 8 was guessed before, and is now for the first time


def test_a_step_costs_the_same_however_long_the_text_is(monkeypatch):
    """Counted, not timed: n-grams entered and looked up per new token."""
    counts: Counter[str] = Counter()

    class Counting(dict):
        def __setitem__(self, key, value):
            counts["entered"] += 1
            super().__setitem__(key, value)

        def get(self, key, default=None):
            counts["looked up"] += 1
            return super().get(key, default)

    create = _Index.__init__

    def counted(self, *args):
        create(self, *args)
        self._places = Counting()

    monkeypatch.setattr(_Index, "__init__", counted)
    drafter = NgramDrafter()
    text = [(i * i * i) % 101 for i in range(4000)]
    growing = request(text[:10], reference=text[:500])
    drafter.propose([growing], [5])
    for end in range(11, 4000):
        before = counts.copy()
        growing.tokens.append(text[end])
        drafter.propose([growing], [5])
        spent = counts - before
        assert spent["entered"] == 3 and spent["looked up"] <= 6  # lengths 2, 3, 4; in two tables
    drafter.release(growing)
    assert not drafter._own and not drafter._reference


def test_requests_do_not_see_each_other():
    drafter = NgramDrafter()
    one, other = request([1, 2, 3, 4, 1, 2], name="1"), request([1, 2, 7, 8, 1, 2], name="2")
    first, second = drafter.propose([one, other], [2, 2])
    assert (first.tokens, second.tokens) == ((3, 4), (7, 8))
    drafter.release(one)
    assert drafter.propose([other], [2])[0].tokens == (7, 8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be a whole number from 1, not 0"),
        ({"prompt_lookup_max": -1}, "prompt_lookup_max must be a whole number from 1, not -1"),
        ({"prompt_lookup_max": True}, "not True"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, r"\(2\) must not be below prompt_lookup_min \(3\)"),
        ({"prompt_lookup_maximum": 2}, "did you mean 'prompt_lookup_max'?"),
    ],
)
def test_options_out_of_range(options, says):
    with pytest.raises(OptionError, match=says):
        registry.parse({"method": "ngram"} | options)


def test_a_bound_that_is_not_given_follows_the_other():
    assert (NgramOptions(prompt_lookup_max=1).shortest, NgramOptions(prompt_lookup_min=6).longest) == (1, 6)


def test_a_target_that_loops_is_drafted_as_a_loop():
    """A table that runs in a circle of three: after the circle has closed, everything drafted is right."""
    model = TableModel(8, order=1, sharpness=0.01)
    for token in range(8):
        model.table[0, token, [1, 2, 0, 1, 1, 1, 1, 1][token]] += 9
    found = engine(model, NgramDrafter(), k=7)
    params = SamplingParams(temperature=0, max_tokens=40)
    (looping,) = found.add([5, 6], params)
    drain(found)
    assert tuple(looping.output) == oracle(model.logits_of, [5, 6], params)
    drafted, accepted = looping.stats.per_step_drafted, looping.stats.per_step_accepted
    assert drafted[-4:-1] == accepted[-4:-1] == [7, 7, 7]
