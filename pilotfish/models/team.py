"""Threads that run one compiled pass together: phases of small jobs, taken one by one, with no lock.

It does not know what a job is. The one trick: nobody is assigned anything. A phase is two counters, jobs taken and
jobs done; whoever comes takes the next job, and a phase is over when all are done. A thread that wakes late or is
pushed off its core delays nothing but the job it holds, and one thread alone gives the same result.

    thread 1   phase 0: jobs 0 1 3 4 .. | wait for done == all | phase 1: jobs 0 2 ..
    thread 2         (waking up) 2 5 .. |                      |          jobs 1 3 ..
"""

import atexit
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ..attention.vectors import Int, add_atomically, compiled, pause, read_atomically

_STRIDE = 128  # bytes between a phase's counters and the next one's: no two share a cache line
_PATIENCE = 2000  # looks at a counter before the core is offered to others

if os.name == "posix":
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @compiled
    def _give_way() -> None:
        _sched_yield()
else:

    @compiled
    def _give_way() -> None:
        pause()


def counters(num_phases: int) -> "np.ndarray[Any, Any]":
    """Fresh counters for one pass. Each pass has its own, so a thread that comes after its end finds all done."""
    return np.zeros(num_phases * _STRIDE // 8, dtype=np.int64)


@compiled
def take(phase: Int) -> Int:
    """The number of the next job of the phase whose counters lie at this address."""
    return add_atomically(phase, 1)


@compiled
def finish(phase: Int, num_jobs: Int, num_done: Int) -> Int:
    """Report ``num_done`` jobs, wait until all ``num_jobs`` are done, and return the next phase's address."""
    if num_done:
        add_atomically(phase + 64, num_done)
    looks = 0
    while read_atomically(phase + 64) < num_jobs:
        pause()
        looks += 1
        if looks % _PATIENCE == 0:
            _give_way()
    return phase + _STRIDE


class Team:
    """``num_threads`` - 1 helpers that sleep between passes. One team serves all models of a process."""

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self._helpers: list[threading.Thread] = []
        self._inboxes: list[queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]] = []
        for number in range(1, num_threads):
            inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
            self._inboxes.append(inbox)
            self._helpers.append(
                threading.Thread(target=_serve, args=(inbox,), name=f"pilotfish-{number}", daemon=True)
            )
            self._helpers[-1].start()
        # A daemon that is killed inside compiled code takes the process down with it.
        atexit.register(self.close)

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(*args)`` on this thread and on the helpers; returns when this thread's call does.

        It may be called once more than there are threads: one that comes when all jobs are done must do nothing.
        """
        job = (function, args)
        try:
            for inbox in self._inboxes:
                inbox.put(job)
            function(*args)
        except BaseException:
            # Ctrl-C, on the way to the compiled code or back. A helper may be at the job, in buffers that the next pass
            # writes to and arrays that the caller is about to drop: so it is finished first.
            function(*args)
            raise

    def close(self) -> None:
        """Let the helpers go."""
        for inbox in self._inboxes:
            inbox.put(None)
        for helper in self._helpers:
            helper.join()
        self._inboxes, self._helpers = [], []
        atexit.unregister(self.close)


def _serve(inbox: "queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]") -> None:
    while (job := inbox.get()) is not None:
        function, args = job
        function(*args)
        del job, function, args  # sleep without holding a cache or a model


_teams: dict[int, Team] = {}


def team(num_threads: int) -> Team:
    """The process's team of this size."""
    if num_threads not in _teams:
        _teams[num_threads] = Team(num_threads)
    return _teams[num_threads]


def _forget_teams() -> None:
    """In a child after a fork: the helpers are the parent's, so nobody may wait for them, at its end either."""
    for one in _teams.values():
        atexit.unregister(one.close)
    _teams.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_teams)
