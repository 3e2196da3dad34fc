"""How runs are driven: seeds that repeat and never meet, a bar that ends where the work ends, pages watched."""

import io

from rich.console import Console

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.engine.engine import Event
from pilotfish.proof.ground import Meter, Watch, drive, measure_pass, seed_stream
from tests import fakes


def test_seeds_repeat_and_do_not_meet():
    streams = {(seed, purpose): seed_stream(seed, purpose) for seed in range(4) for purpose in range(6)}
    drawn = {key: [stream() for _ in range(50)] for key, stream in streams.items()}
    assert len({seed for seeds in drawn.values() for seed in seeds}) == 4 * 6 * 50
    again = seed_stream(2, 3)
    assert [again() for _ in range(50)] == drawn[2, 3]


def test_the_bar_knows_what_is_left_and_stays_off_a_pipe():
    screen = io.StringIO()
    meter = Meter(Console(file=screen, force_terminal=True, width=80))
    with meter.running():
        meter.plan(10.0)
        with meter.stage("texts", 4.0, 8):
            meter.tick(4)
            assert meter.fraction == 0.2
            meter.tick(100)
            assert meter.fraction == 0.4, "a stage cannot run over"
        with meter.stage("laws", 6.0, 3):
            meter.tick()
        assert meter.fraction == 1.0, "a stage that ends early is done"
    assert "laws" in screen.getvalue()
    pipe = io.StringIO()
    with Meter(Console(file=pipe)).running():
        pass
    assert pipe.getvalue() == ""


def test_every_step_is_looked_at(table):
    engine, watch = fakes.engine(table), Watch()
    events: list[Event] = []
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
    drive(engine, watch, events.append)
    assert sum(len(event.tokens) for event in events) == 5
    assert watch.num_looks == 5 + 1
    assert watch.faults == []


def test_a_pass_takes_time(ground, table):
    own = ground(table)
    assert 0 < measure_pass(own) < 10
    assert own.watch.faults == []
