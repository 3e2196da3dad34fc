"""Threads that run one job together: nobody leaves it half done."""

import threading
import time

import numpy as np
import pytest

from pilotfish.models.team import Team, counters, finish, take

NUM_JOBS = 4


@pytest.fixture
def pair():
    team = Team(2)
    yield team
    team.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_leaves_no_helper_at_work(pair: Team, moment: str) -> None:
    """On the way to the compiled code or back: the helper has the job, whose memory the caller then drops."""
    phases, done, interrupted = counters(1), [], threading.Event()

    def work(phases: np.ndarray) -> None:
        first = threading.current_thread() is threading.main_thread() and not interrupted.is_set()
        if first and moment == "before":
            interrupted.set()
            raise KeyboardInterrupt
        num_done = 0
        while (job := take(phases.ctypes.data)) < NUM_JOBS:
            time.sleep(0.02)
            done.append(job)
            num_done += 1
        finish(phases.ctypes.data, NUM_JOBS, num_done)
        if first:
            interrupted.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.run(work, phases)
    assert interrupted.is_set() and sorted(done) == list(range(NUM_JOBS))
    phases = counters(1)
    pair.run(work, phases)
    assert sorted(done) == sorted([*range(NUM_JOBS)] * 2)
