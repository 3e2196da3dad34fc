"""Matrix products of the C++ kernels, 1 to 16 rows, beside the speed at which memory can be read in the same run.

It does not know models (`passes` does). The one trick: one call goes through many copies of a matrix, as a pass goes
through its layers, so none is in a cache when its turn comes and no thread has to be woken for each; rows and plain
reading take turns, so that whatever else runs here disturbs all alike.

    python -m pilotfish.bench.kernels        a table per number of threads: GB/s and what a row more costs
"""

import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ..errors import PilotfishError
from ..models.kernels import library
from ..models.memory import large
from ..models.products import GROUP, GROUPED, ROWS, SCALE_BYTES, SUMS_LINE, TILE_BYTES
from ..native.library import Library

NUM_ROWS = (1, 2, 4, 8, 16)
NUM_THREADS = (1, 2)
SHAPES = ((4096, 1536), (8960, 1536), (1536, 8960))  # outputs, inputs
NAMES = {4: "int4", 8: "int8", GROUPED: "int8, scales a group"}
_TOTAL_BYTES = 256_000_000  # of all copies: more than a cache holds
_TURNS = 15

Array = np.ndarray[Any, Any]


class Product:
    """Copies of one random matrix, and 16 rows to multiply them with. bits: 4, 8, or `GROUPED`."""

    def __init__(self, outputs: int, inputs: int, bits: int):
        rng = np.random.default_rng(0)
        self.groups, self.tiles = inputs // GROUP, outputs // 16
        self.num_bytes = self.tiles * self.groups * TILE_BYTES[bits]
        scale_bytes = self.tiles * (64 if bits == 8 else self.groups * SCALE_BYTES[bits])
        self.num_copies = max(2, _TOTAL_BYTES // self.num_bytes)
        self.memory = large(self.num_copies * (self.num_bytes + scale_bytes))
        self.bias = np.zeros(outputs, np.float32)
        numbers = rng.integers(0, 256, self.num_bytes, np.uint8)
        scales = np.full(scale_bytes // (4 if bits == 8 else 2), 0.01, np.float32 if bits == 8 else np.float16)
        matrices = []
        for start in range(0, len(self.memory), self.num_bytes + scale_bytes):
            middle = start + self.num_bytes
            self.memory[start:middle], self.memory[middle : middle + scale_bytes] = numbers, scales.view(np.uint8)
            place = self.memory.ctypes.data + start
            matrices.append((place, place + self.num_bytes, self.bias.ctypes.data, bits))
        self.matrices = np.array(matrices, np.int64)
        self.all_bytes = self.num_bytes + scale_bytes
        blocks = max(NUM_ROWS) // ROWS
        self.rows = (
            rng.integers(-127, 128, blocks * inputs * ROWS, np.int8),
            np.ones(blocks * self.groups * ROWS, np.float32),
            np.zeros(blocks * self.groups * SUMS_LINE // 4, np.int32),
        )
        self.blocks = np.array([part.ctypes.data for part in self.rows], np.int64)
        self.out = np.zeros((max(NUM_ROWS), outputs), np.float32)

    def run(self, native: Library, num_rows: int, num_threads: int) -> float:
        """Seconds of all copies in turn; of 0 rows: only reading the weights."""
        places = np.ascontiguousarray(self.matrices[:, 0])

        def work() -> None:
            if num_rows:
                native.products(
                    num_threads, self.matrices.ctypes.data, self.num_copies, self.blocks.ctypes.data, num_rows,
                    self.groups, self.tiles, self.out.ctypes.data, self.out.shape[1], 0,
                )  # fmt: skip
            else:
                native.read(num_threads, places.ctypes.data, self.num_copies, self.num_bytes)

        return _seconds(work)

    def speed(self, num_rows: int, seconds: float) -> float:
        """Bytes a second."""
        return self.num_copies * (self.all_bytes if num_rows else self.num_bytes) / seconds


def measure(native: Library, product: Product, num_threads: int, turns: int = _TURNS) -> dict[int, float]:
    """Seconds per number of rows, medians of ``turns`` turns; of 0 rows: only reading the weights."""
    found: dict[int, list[float]] = {rows: [] for rows in (0, *NUM_ROWS)}
    for _ in range(turns):
        for rows, seconds in found.items():
            seconds.append(product.run(native, rows, num_threads))
    return {rows: statistics.median(seconds) for rows, seconds in found.items()}


def _seconds(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Time products of the C++ kernels against plain reading of memory."""
    try:
        native = library()
    except PilotfishError as error:
        click.echo(f"pilotfish: {error}", err=True)
        sys.exit(1)
    for num_threads in NUM_THREADS:
        table = Table(title=f"{native.kind}, {num_threads} thread{'s' * (num_threads > 1)}")
        table.add_column("weights")
        for heading in ("memory GB/s", *(f"{rows} row{'s' * (rows > 1)} GB/s" for rows in NUM_ROWS), "8 / 1", "16 / 1"):
            table.add_column(heading, justify="right")
        for bits, name in NAMES.items():
            for outputs, inputs in SHAPES:
                product = Product(outputs, inputs, bits)
                seconds = measure(native, product, num_threads)
                speeds = [product.speed(rows, seconds[rows]) / 1e9 for rows in seconds]
                ratios = [seconds[rows] / seconds[1] for rows in (8, 16)]
                table.add_row(
                    f"{name} {outputs} x {inputs}", *(f"{x:.1f}" for x in speeds), *(f"{x:.2f}" for x in ratios)
                )
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
