"""Whole passes of a quantised model, 1 to 16 rows, beside the floor: what reading its weights alone takes here and now.

It does not know speed-ups or texts. The one trick: C++ and numba, all numbers of rows, and plain reading of memory
take turns, so that a neighbour's noise falls on all alike.

    python -m pilotfish.bench.passes --model demo --quantization int4 --context 128
"""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ..errors import OptionError, PilotfishError, UserError
from ..flags import from_fields, pick
from ..models.kernels import library
from ..models.load import load
from ..models.memory import large
from ..models.quantized import QuantizedDecoder
from ..paged.batch import Feed, lay_out
from ..paged.cache import KVCache

NUM_ROWS = (1, 2, 4, 8, 16)
KERNELS: tuple[Literal["native", "numba"], ...] = ("native", "numba")
_READ_BYTES, _READ_PARTS = 1 << 24, 16
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """Raises OptionError for values out of range."""

    model: str = field(default="demo", metadata={"help": "a folder, a hub id, a GGUF file, or demo"})
    quantization: Literal["int8", "int4", "gguf"] = field(default="int8", metadata={"help": "weights"})
    context: int = field(default=128, metadata={"help": "tokens before the rows of a pass"})
    turns: int = field(default=20, metadata={"help": "passes of each kind; medians count"})

    def __post_init__(self) -> None:
        for name in ("context", "turns"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a whole number, 1 or more, not {value!r}")


@dataclass(frozen=True, slots=True)
class Passes:
    """Medians in seconds, by kernels and number of rows. floor: of reading ``num_bytes`` of weights."""

    seconds: Mapping[tuple[str, int], float]
    floor: float
    num_bytes: int


def measure(options: PassOptions) -> Passes:
    """Raises ModelError if the model cannot be loaded so, OptionError if the context is too long for it."""
    models: dict[str, QuantizedDecoder] = {}
    for kernels in KERNELS:
        model = load(options.model, quantization=options.quantization, kernels=kernels).model
        if not isinstance(model, QuantizedDecoder):
            raise OptionError(f"{options.model} cannot be quantised, and only such models are timed here")
        models[kernels] = model
    if options.context + NUM_ROWS[-1] > model.info.context:
        raise OptionError(f"context {options.context} is too long: {options.model} ends at {model.info.context}")
    caches = {kernels: _begun(model, options.context) for kernels, model in models.items()}
    found: dict[tuple[str, int], list[float]] = {(name, rows): [] for rows in NUM_ROWS for name in KERNELS}
    speeds, memory = [], large(_READ_BYTES * _READ_PARTS)
    memory[:] = 1
    for _ in range(options.turns):
        speeds.append(len(memory) / _read(memory))
        for (name, rows), seconds in found.items():
            batch = lay_out([Feed("text", [7] * rows, options.context, rows)], caches[name])
            start = perf_counter()
            models[name].forward(batch, caches[name])
            seconds.append(perf_counter() - start)
    num_bytes = read_in_a_pass(models[KERNELS[0]])
    medians = {key: statistics.median(seconds) for key, seconds in found.items()}
    return Passes(medians, num_bytes / statistics.median(speeds), num_bytes)


def read_in_a_pass(model: QuantizedDecoder) -> int:
    """Bytes of weights; of an embedding that is not the head too, only rows are looked up."""
    arrays, tied = model.quantised.arrays, model.architecture.tied
    return sum(array.nbytes for name, array in arrays.items() if tied or not name.startswith("embedding."))


def _begun(model: QuantizedDecoder, context: int) -> KVCache:
    cache = model.new_cache(-(-(context + NUM_ROWS[-1]) // 16))
    cache.open("text", [5])
    cache.reserve("text", context + NUM_ROWS[-1])
    for start in range(0, context, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, context - start)
        model.forward(lay_out([Feed("text", [5] * count, start, 0)], cache), cache)
    return cache


def _read(memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> float:
    """Seconds."""
    native, places = library(), memory.ctypes.data + np.arange(_READ_PARTS, dtype=np.int64) * _READ_BYTES
    start = perf_counter()
    native.read(torch.get_num_threads(), places.ctypes.data, _READ_PARTS, _READ_BYTES)
    return perf_counter() - start


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@from_fields(PassOptions)
def main(**values: object) -> None:
    """Time whole passes of a quantised model against the time of reading its weights."""
    try:
        options = pick(PassOptions, values)
        found = measure(options)
    except PilotfishError as error:
        click.echo(f"pilotfish: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    speed = found.num_bytes / found.floor / 1e9
    table = Table(
        title=f"{options.model}, {options.quantization}, {options.context} tokens before, {torch.get_num_threads()} "
        f"threads: {found.num_bytes / 1e6:.0f} MB at {speed:.1f} GB/s are {found.floor * 1e3:.2f} ms"
    )
    table.add_column("kernels")
    for heading in (*(f"{rows} row{'s' * (rows > 1)}, ms" for rows in NUM_ROWS), "1 / floor", "8 / 1", "16 / 1"):
        table.add_column(heading, justify="right")
    for kernels in KERNELS:
        one, eight, sixteen = (found.seconds[kernels, rows] for rows in (1, 8, 16))
        table.add_row(
            kernels,
            *(f"{found.seconds[kernels, rows] * 1e3:.2f}" for rows in NUM_ROWS),
            *(f"{ratio:.2f}" for ratio in (one / found.floor, eight / one, sixteen / one)),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
