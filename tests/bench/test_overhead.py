"""The overhead bench runs, and what it feeds the engine is what it claims. How long it takes is not asserted."""

from pilotfish.bench import overhead
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.options import EngineOptions


def test_it_measures_every_case() -> None:
    found = overhead.measure(num_steps=5, num_tokens=64)
    assert set(found) == {"greedy_ms", "sampling_ms", "top_p_ms", "coupled_ms"}
    assert all(value > 0 for value in found.values())


def test_drafts_are_full_and_accepted_in_part() -> None:
    """A bench of drafts that are all wrong, or all right, would leave out half of the work."""
    target_PV, draft_PV = overhead.tables(2048)
    for drafter, params in (
        (overhead.greedy_drafter(target_PV), SamplingParams(temperature=0, max_tokens=300)),
        (overhead.drawing_drafter(draft_PV), SamplingParams(max_tokens=300)),
        (overhead.greedy_drafter(target_PV), SamplingParams(max_tokens=300, seed=3)),
    ):
        target = overhead.LookupTarget(target_PV)
        engine = Engine(target, lambda _s, d=drafter: d, EngineOptions(max_model_len=1024), num_speculative_tokens=8)  # type: ignore[misc]
        (request,) = engine.add([1, 2, 3], params)
        while not request.finish:
            engine.step()
        assert set(request.stats.per_step_drafted[:20]) == {8}
        assert 0.1 < request.stats.report()["draft_acceptance_rate"] < 0.95  # type: ignore[operator]
        assert target.seconds > 0


def test_the_target_is_right_for_every_position() -> None:
    target_PV, _ = overhead.tables(64)
    target = overhead.LookupTarget(target_PV)
    engine = Engine(target, lambda _s: overhead.greedy_drafter(target_PV), num_speculative_tokens=8)
    (request,) = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=100))
    while not request.finish:
        engine.step()
    expected = [int(target_PV[(2 + i) % overhead.PERIOD].argmax()) for i in range(100)]
    assert request.output == expected
