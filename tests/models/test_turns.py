"""Forks of a process whose threads are at work: a child that waits for none of them, and computes the same bits."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, signal, threading, time

def child(work):
    '''How a fork's end went: work's exit status, -14 (SIGALRM) if it waits for ever.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(script: str) -> list[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_a_fork_waits_for_turns() -> None:
    """And not for any other lock, which is what the child would be left with."""
    told = run("""
from pilotfish.models.turns import Turn
turn, plain, written, inside = Turn(), threading.Lock(), [], threading.Event()

def pass_():
    with turn.lock:
        written.append("begun")
        inside.set()
        time.sleep(0.2)
        written.append("ended")

def whole():
    with turn.lock:
        return len(written)

threading.Thread(target=pass_).start()
threading.Thread(target=plain.acquire).start()
inside.wait()
print(child(whole), child(lambda: int(plain.acquire(timeout=0.1))), child(whole))
with turn.lock:  # a signal's handler may fork within a pass
    print(child(whole))
print(whole())
""")
    assert told == ["2", "0", "2", "2", "2"]


def test_forks_and_nested_turns_do_not_wait_for_each_other() -> None:
    told = run("""
from pilotfish.models.turns import Turn
inner, end, found = Turn(), time.monotonic() + 0.5, []
outer = Turn()

def passes(*turns):
    while time.monotonic() < end:
        with turns[0].lock, turns[-1].lock:
            time.sleep(0.001)

def both():
    with outer.lock, inner.lock:
        return 0

def forks():
    while time.monotonic() < end:
        found.append(child(both))

threads = [threading.Thread(target=passes, args=turns) for turns in ((outer, inner), (inner,))]
threads += [threading.Thread(target=forks) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found) > 2, set(found))
""")
    assert told == ["True", "{0}"]


def test_a_child_computes_the_same_bits() -> None:
    """With threads of its own; forked between passes, and while another thread is inside one. C++ (if it can be had)
    and numba's loops."""
    told = run("""
import torch
from pilotfish.models import team
from pilotfish.models.quantized import QuantizedDecoder
from tests.models.test_quantized import LONG, begun, quantised, logits

torch.set_num_threads(2)
weights = quantised().quantised

def results(kernels):
    lm = QuantizedDecoder(weights, "one", kernels=kernels)
    cache, other, inside, run = begun(lm, 10), begun(lm, 10), threading.Event(), lm._runner
    right = logits(lm, cache, LONG[10:16], 10)

    def same():
        equal = torch.equal(logits(lm, cache, LONG[10:16], 10), right)
        (helper,) = team.team(2)._helpers
        return 1 if equal and helper.is_alive() else 2

    def slow(*args):
        inside.set()
        time.sleep(0.3)
        run(*args)

    yield child(same)
    lm._runner = slow
    thread = threading.Thread(target=lambda: logits(lm, other, LONG[20:40], 10))
    thread.start()
    inside.wait()
    lm._runner = run
    yield child(same)
    yield child(lambda: child(same))
    thread.join()
    yield same()

print(*results("auto"), *results("numba"))
""")
    assert told == ["1"] * 8
