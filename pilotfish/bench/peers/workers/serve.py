"""The protocol of a worker: a JSON object a line on stdin, one a line back on stdout. ``python serve.py SCRIPT``.

It does not know engines; it needs only the standard library, for it runs where pilotfish is not installed. The one
trick: the real stdout is put aside before the script is loaded, so whatever an engine prints goes to the log.

    {"do": "prepare", ...settings}   -> {"seconds"}                              files that are made once
    {"do": "load", ...settings}      -> {"seconds", "peak_bytes", "version", "precision"}
    {"do": "run", "variant", "ids", "max_tokens"} -> {"bursts", "ids", "peak_bytes"}
    anything that fails              -> {"error"}; the traceback is in the log

A burst is [seconds since the start, number of tokens that came at once]. peak_bytes: the most memory resident since
loading began, or since the run began, files mapped into memory included.
"""

import json
import os
import resource
import runpy
import sys
import time
import traceback
from typing import Any, TextIO


def peak_bytes() -> int:
    """The most that was resident in this process and the largest of its children, since `forget_peak`."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            own = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not Linux
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(own, children)


def forget_peak() -> None:
    """Start anew from what is resident now; where the system cannot, the peak is the process's."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


def answer(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What one request comes to."""
    do = request.pop("do")
    forget_peak()
    start = time.perf_counter()
    if do == "prepare":
        worker.prepare(request)
        return {"seconds": time.perf_counter() - start}
    if do == "load":
        about = worker.load(request)
        return {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes(), **about}
    bursts: list[tuple[float, int]] = []
    ids: list[int] = []

    def emit(tokens: list[int]) -> None:
        bursts.append((time.perf_counter() - start, len(tokens)))
        ids.extend(tokens)

    worker.run(request["variant"], request["ids"], request["max_tokens"], emit)
    return {"bursts": bursts, "ids": ids, "peak_bytes": peak_bytes()}


def serve(script: str, answers: TextIO) -> None:
    """Answer requests until stdin ends."""
    worker = None
    for line in sys.stdin:
        try:
            if worker is None:
                worker = runpy.run_path(script)["Worker"]()
            reply = answer(worker, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            reply = {"error": f"{type(error).__name__}: {first}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files must not hide an engine's
    aside = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], aside)
