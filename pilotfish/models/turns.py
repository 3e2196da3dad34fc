"""Passes of one model, one at a time, and a fork between them, never within one.

It does not know passes. The one trick: a fork waits until every turn is over. Of all threads only the one that forked
goes on in the child: a lock that another held would be held there for ever, and what it was writing stay half-written.

What else a process with threads may not do after a fork is not mended here: torch's own threads are not there either,
so a child should call `torch.set_num_threads(1)` before it uses torch's larger operations.
"""

import itertools
import os
import threading
from weakref import WeakSet

_ages = itertools.count()
_turns: "WeakSet[Turn]" = WeakSet()
_forking = threading.RLock()  # held for the length of a fork, and wherever a turn is made
_held: "list[Turn]" = []  # by the thread that forks


class Turn:
    """``with turn.lock:`` waits until nobody else has it. A pass may take turns of several models, the newest model's
    first: what wraps a model is made after it.

    The lock itself is what is entered, for that is one step to Python: Ctrl-C within a method of ours would leave it
    held for ever."""

    def __init__(self) -> None:
        self.age = next(_ages)
        # Re-entered only by a fork in the midst of a pass, which a signal handler may ask for: it must not wait there.
        self.lock = threading.RLock()
        with _forking:
            _turns.add(self)


def _wait_for_all() -> None:
    _forking.acquire()
    for turn in sorted(_turns, key=lambda turn: -turn.age):  # in the order in which passes take them: no deadlock
        turn.lock.acquire()
        _held.append(turn)


def _go_on() -> None:
    while _held:
        _held.pop().lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all, after_in_parent=_go_on, after_in_child=_go_on)
