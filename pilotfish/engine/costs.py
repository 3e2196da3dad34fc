"""Measures what a pass costs by its number of rows, once per model and machine, in about a second.

It does not know what the numbers decide (that is `controller`). The one trick: the rows follow a short dummy text, so
what is timed is the very call that verification makes.
"""

import hashlib
import json
import os
import platform
import time
from pathlib import Path

import torch

from ..models.base import CausalLM
from ..models.disk_cache import cache_folder
from ..paged.batch import Feed, lay_out
from .controller import PassCosts

ROWS = (1, 2, 4, 8, 16)
_CONTEXT = 64
_SECONDS = 1.0


def measured(model: CausalLM) -> PassCosts:
    """Costs of this model on this machine: from the user's cache folder, else measured now and kept there."""
    path = cache_folder() / "costs" / f"{_key(model)}.json"
    try:
        return PassCosts({int(rows): float(seconds) for rows, seconds in json.loads(path.read_text()).items()})
    except (OSError, ValueError, AttributeError):
        costs = measure(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(costs.points))
        fresh.replace(path)
    except OSError:
        pass  # a read-only home costs a second each start, nothing else
    return costs


def measure(model: CausalLM, seconds: float = _SECONDS) -> PassCosts:
    """Time passes over 1 to 16 rows, interleaved, keeping the fastest of each; stops when the time is up."""
    info = model.info
    context = min(_CONTEXT, max(1, info.context - ROWS[-1]))
    counts = [rows for rows in ROWS if rows <= max(1, info.context - context)]
    page_size = context + counts[-1]
    cache = model.new_cache(1, page_size)
    cache.open("costs", [0])
    cache.reserve("costs", page_size)
    model.forward(lay_out([Feed("costs", [0] * context, 0, 1)], cache, info.device), cache)
    best: dict[int, float] = {}
    started = time.perf_counter()
    while len(best) < len(counts) or time.perf_counter() - started < seconds:
        for rows in counts:
            batch = lay_out([Feed("costs", [0] * rows, context, rows)], cache, info.device)
            before = time.perf_counter()
            output = model.forward(batch, cache)
            float(output.logits_NV[0, 0])  # waits for a device that runs behind
            took = time.perf_counter() - before
            best[rows] = min(best.get(rows, took), took)
            if len(best) == len(counts) and time.perf_counter() - started > seconds:
                break
    return PassCosts(best)


def _key(model: CausalLM) -> str:
    info = model.info
    facts = (info, _processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
