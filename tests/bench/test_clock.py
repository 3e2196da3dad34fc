"""How a step's time is divided, and what counts as a decoding step."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from pilotfish.bench.clock import Clock, Outcome, TimedStep, depth_of
from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.base import Drafter
from pilotfish.engine.engine import Engine
from pilotfish.engine.options import EngineOptions
from tests.adversaries import Faulty, Scripted, foresight
from tests.fakes import TableModel

GREEDY = SamplingParams(temperature=0, max_tokens=13)


class Sleepy(Drafter):
    """Takes 20 ms to draft and 10 ms to observe."""

    def __init__(self, inner: Drafter):
        self.inner = inner

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        time.sleep(0.02)
        return self.inner.propose(requests, limits)

    def observe(self, steps: Any, taps: Any) -> None:
        time.sleep(0.01)


def run(drafter: Drafter, model: TableModel, params: SamplingParams = GREEDY, k: int = 3, **options: Any) -> list[Any]:
    """What the clock said of each step."""
    engine = Engine(model, lambda _s: drafter, EngineOptions(**options), num_speculative_tokens=k)
    clock = Clock(engine)
    engine.add([1, 2, 3, 4, 5], params)
    steps = []
    while engine.has_work:
        steps.append(clock.step()[1])
    return steps


def outcomes(steps: Sequence[TimedStep | None]) -> list[Outcome]:
    return [outcome for step in steps if step is not None for outcome in step.outcomes]


def test_a_step_that_reads_a_prompt_is_not_timed() -> None:
    model = TableModel(8)
    steps = run(foresight(model), model, max_num_batched_tokens=3, max_num_seqs=1)
    assert [step is None for step in steps[:3]] == [True, True, False]  # five tokens in chunks of three


def test_rows_and_outcomes_of_full_drafts() -> None:
    model = TableModel(8)
    steps = run(foresight(model), model)
    assert steps[0] is None
    # 13 tokens: 4 with the prompt, 4, 4, and the last alone, which leaves no room for a draft.
    assert outcomes(steps) == [Outcome(3, 3), Outcome(3, 3), Outcome(0, 0)]
    assert [step.num_rows for step in steps[1:]] == [4, 4, 1]
    assert outcomes(run(foresight(model, wrong=True), model))[0] == Outcome(3, 0)


def test_drafting_includes_observing_and_is_apart_from_the_pass() -> None:
    model = TableModel(8)
    steps = [step for step in run(Sleepy(foresight(model)), model) if step is not None]
    assert steps[0].draft_seconds >= 0.03
    assert steps[-1].draft_seconds >= 0.01  # nothing to draft any more, but told what was kept
    for step in steps:
        assert 0 < step.pass_seconds < step.seconds
        assert step.draft_seconds + step.pass_seconds <= step.seconds


def test_what_lies_behind_the_end_of_a_text_is_not_judged() -> None:
    model = TableModel(8)
    engine = Engine(model, lambda _s: foresight(model), num_speculative_tokens=3)
    (request,) = engine.add([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=40))
    while not request.finish:
        engine.step()
    stop = request.output[5]  # in the first draft after the prompt's, or earlier
    first = request.output.index(stop)
    found = outcomes(run(foresight(model), model, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop])))
    assert all(outcome.accepted == outcome.drafted for outcome in found)
    assert sum(outcome.accepted for outcome in found) < first + 1


def test_a_failed_draft_is_none() -> None:
    model = TableModel(8)
    found = outcomes(run(Faulty(foresight(model)), model))
    assert found[0] == Outcome(3, 3)  # the first call, with the prompt, failed
    assert Outcome(0, 0) in found


def test_a_tree_counts_its_depth() -> None:
    tree = Draft((1, 2, 3, 4), (-1, -1, 0, 2))
    assert depth_of(tree) == 3
    assert depth_of(tree.first(2)) == 1
    assert depth_of(chain([1, 2])) == 2
    assert depth_of(EMPTY) == 0
    model = TableModel(8)
    steps = run(Scripted(lambda _request, limit: tree.first(limit), trees=True), model, k=4)
    assert max(outcome.drafted for outcome in outcomes(steps)) == 3
    assert max(step.num_rows for step in steps if step is not None) == 5


def test_the_drafter_stays_itself() -> None:
    model = TableModel(8)
    engine = Engine(model, lambda _s: foresight(model), num_speculative_tokens=3)
    drafter = engine.drafter
    Clock(engine)
    assert engine.drafter is drafter
    assert isinstance(engine.drafter, Scripted)
    assert engine.target.info is model.info
    with pytest.raises(TypeError):
        engine.target.forward(None, None, surprise=1)  # type: ignore[call-arg, arg-type]
