"""Measures what a pass costs by its number of rows, once per model and machine, in about a second; and remembers what
drafting gained by the controller's own account, for the line that greets the next start.

It does not know what the numbers decide (that is `controller`). The one trick: the rows follow a short dummy text, so
what is timed is the very call that verification makes.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..models.base import CausalLM
from ..models.disk_cache import cache_folder
from ..paged.batch import Feed, lay_out
from .curve import CostCurve

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 32, 64)  # 9: a product's rows come in blocks of 8
_NEEDED = 16  # as many rows are timed whatever it takes; more only while there is time
_CONTEXT = 64
_SECONDS = 1.0
_FADING_TOKENS = 20_000
_ENOUGH = 8  # rounds after which what was measured is believed


def measured(model: CausalLM) -> CostCurve:
    """Costs of this model on this machine.

    Kept in the user's cache folder. One start may fall on a busy moment, so the first few all measure and the fastest
    times are kept; a start that finds enough of them measures nothing.
    """
    path = cache_folder() / "costs" / f"{_key(model)}.json"
    points, num_rounds = _read(path)
    if num_rounds >= _ENOUGH:
        return CostCurve(points)
    fresh, rounds = measure(model)
    points = {rows: min(points.get(rows, seconds), seconds) for rows, seconds in fresh.items()} | {
        rows: seconds for rows, seconds in points.items() if rows not in fresh
    }
    _write(path, {"rounds": num_rounds + rounds, "seconds": points})
    return CostCurve(points)


def remember_gain(model: CausalLM, method: str, gain: float, num_tokens: int) -> None:
    """Blend a run's predicted gain with what is known of this model and method, by tokens, the past fading."""
    path = _gain_path(model, method)
    past, past_tokens = _read_gain(path)
    past_tokens = min(past_tokens, _FADING_TOKENS)
    blended = (past * past_tokens + gain * num_tokens) / (past_tokens + num_tokens)
    _write(path, {"gain": blended, "tokens": past_tokens + num_tokens})


def remembered_gain(model: CausalLM, method: str) -> float | None:
    """What drafting gained in earlier runs, as the controller saw it; None if there is no record."""
    gain, num_tokens = _read_gain(_gain_path(model, method))
    return gain if num_tokens else None


def _gain_path(model: CausalLM, method: str) -> Path:
    return cache_folder() / "costs" / f"{_key(model)}-{hashlib.sha256(method.encode()).hexdigest()[:12]}.gain"


def _read_gain(path: Path) -> tuple[float, int]:
    try:
        found = json.loads(path.read_text())
        gain, num_tokens = float(found["gain"]), int(found["tokens"])
        return (gain, num_tokens) if 0 < gain < 100 and num_tokens > 0 else (1.0, 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 1.0, 0


def _write(path: Path, record: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(record))
        partial.replace(path)
    except OSError:
        pass  # a read-only home costs a second each start, nothing else


def _read(path: Path) -> tuple[dict[int, float], int]:
    """What earlier starts measured, and in how many rounds; nothing if there is none or it cannot be read."""
    try:
        found = json.loads(path.read_text())
        points = {int(rows): float(seconds) for rows, seconds in found["seconds"].items()}
        usable = all(rows > 0 and 1e-9 < seconds < 1e6 for rows, seconds in points.items())
        return (points, int(found["rounds"])) if points and usable else ({}, 0)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError):
        return {}, 0


def measure(model: CausalLM, seconds: float = _SECONDS) -> tuple[dict[int, float], int]:
    """Time passes over 1 to 64 rows, interleaved, keeping the fastest of each, and how many rounds there were."""
    info = model.info
    context = min(_CONTEXT, max(1, info.context - ROWS[-1]))
    counts = [rows for rows in ROWS if rows <= max(1, info.context - context)]
    page_size = context + counts[-1]
    cache = model.new_cache(1, page_size)
    cache.open("costs", [0], info.trial_source([0] * _CONTEXT))
    cache.reserve("costs", page_size)
    model.forward(lay_out([Feed("costs", [0] * context, 0, 1)], cache, info.device), cache)
    best: dict[int, float] = {}
    started, rounds = time.perf_counter(), 0
    while rounds == 0 or (rounds < _ENOUGH and time.perf_counter() - started < seconds):
        for rows in counts:
            if time.perf_counter() - started > seconds and (rounds or rows > _NEEDED):
                break
            batch = lay_out([Feed("costs", [0] * rows, context, rows)], cache, info.device)
            before = time.perf_counter()
            output = model.forward(batch, cache)
            float(output.logits_NV[0, 0])  # waits for a device that runs behind
            took = time.perf_counter() - before
            best[rows] = min(best.get(rows, took), took)
        rounds += 1
    return best, rounds


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
