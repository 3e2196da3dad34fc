"""What the engine tells of drafts: for requests that are traced, and for no others."""

import pytest

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.first_of import FirstOfDrafter
from tests.adversaries import SlowStart, foresight, random_trees
from tests.fakes import TableModel, drain, engine

MODEL = TableModel(8, order=1, num_phases=3)
KINDS = [SamplingParams(max_tokens=40, **kind) for kind in ({"temperature": 0}, {"seed": 4}, {})]


@pytest.mark.parametrize("params", KINDS, ids=["greedy", "seeded", "sampled"])
def test_a_guess_is_the_draft_and_what_became_of_it(params):
    found = engine(MODEL, random_trees(8), k=8)
    (traced,), (other,) = found.add([3, 1], params, traced=True), found.add([3, 1], params)
    events = drain(found)
    guesses = [(event, event.guess) for event in events if event.request is traced and event.num_drafted]
    assert not [event for event in events if event.guess and event.request is other]
    assert any(event.num_drafted for event in events if event.request is other)
    for event, guess in guesses:
        assert guess.method == "adversaries" and len(guess.tokens) == event.num_drafted
        path = sorted(guess.accepted)
        assert [guess.tokens[node] for node in path] == list(event.tokens[: event.num_accepted])
        assert [guess.parents[node] for node in path] == [-1, *path][: len(path)]
    assert sum(event.num_drafted for event, _ in guesses) == sum(traced.stats.per_step_drafted)
    accepted = sum(len(guess.accepted) for _, guess in guesses)
    assert 0 < accepted == sum(traced.stats.per_step_accepted) < sum(traced.stats.per_step_drafted)


def test_a_trace_changes_nothing():
    texts = []
    for traced in (False, True):
        found = engine(MODEL, random_trees(8), k=8)
        requests = [found.add([3, 1], params, traced=traced)[0] for params in KINDS]
        drain(found)
        texts.append([request.output for request in requests])
    assert texts[0] == texts[1]


def test_the_method_is_the_member_that_drafted():
    """The first one pauses now and then. The second is always right, and has a module, hence a name, of its own."""
    first, second = SlowStart(random_trees(8)), foresight(MODEL)
    second.__class__ = type("Foresight", (type(second),), {"__module__": "elsewhere.foresight"})
    found = engine(MODEL, FirstOfDrafter([first, second]), k=6)
    (request,) = found.add([3, 1], SamplingParams(temperature=0, max_tokens=60), traced=True)
    guesses = [event.guess for event in drain(found) if event.guess]
    by_method = {guess.method for guess in guesses}
    assert by_method == {"adversaries", "foresight"}
    assert all(len(guess.accepted) == len(guess.tokens) for guess in guesses if guess.method == "foresight")
    assert any(len(guess.accepted) < len(guess.tokens) for guess in guesses if guess.method == "adversaries")
    assert request.num_output == 60
