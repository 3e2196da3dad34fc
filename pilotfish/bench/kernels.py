"""Matrix products of the C++ kernels, 1 to 16 rows, beside the speed at which memory can be read in the same run.

It does not know models. The one trick: weights are many copies taken in turn, so none is in a cache when its turn
comes, and rows and the plain reading of memory take turns too, so that whatever else runs here disturbs all alike. Of
each the fastest turn counts.

    python -m pilotfish.bench.kernels        a table per number of threads: GB/s and what a row more costs
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..models.kernels import library
from ..models.products import GROUP, ROWS, SUMS_LINE
from ..models.team import counters, team
from ..native.library import Library

NUM_ROWS = (1, 2, 4, 8, 16)
NUM_THREADS = (1, 2)
SHAPES = ((4096, 1536), (8960, 1536))  # outputs, inputs
_TOTAL_BYTES = 96_000_000  # of all copies: more than a cache holds
_TURNS = 40

Array = np.ndarray[Any, Any]


class Product:
    """Copies of one random matrix, and 16 rows to multiply them with."""

    def __init__(self, outputs: int, inputs: int, bits: int):
        rng = np.random.default_rng(0)
        self.groups, self.tiles = inputs // GROUP, outputs // 16
        self.num_bytes = self.tiles * self.groups * (GROUP * 2 * bits + (64 if bits == 4 else 0))
        num_copies = max(2, _TOTAL_BYTES // self.num_bytes)
        self.weights = rng.integers(0, 256, (num_copies, self.tiles * self.groups * GROUP * 2 * bits), np.uint8)
        num_scales = self.tiles * (32 * self.groups if bits == 4 else 16)
        self.scales = np.full((num_copies, num_scales), 0.01, np.float16 if bits == 4 else np.float32)
        self.bias = np.zeros(outputs, np.float32)
        self.matrices = np.array(
            [
                (w.ctypes.data, s.ctypes.data, self.bias.ctypes.data, bits)
                for w, s in zip(self.weights, self.scales, strict=True)
            ]
        )
        blocks = max(NUM_ROWS) // ROWS
        self.rows = (
            rng.integers(-127, 128, blocks * inputs * ROWS, np.int8),
            np.ones(blocks * self.groups * ROWS, np.float32),
            np.zeros(blocks * self.groups * SUMS_LINE // 4, np.int32),
        )
        self.blocks = np.array([part.ctypes.data for part in self.rows], np.int64)
        self.out = np.zeros((max(NUM_ROWS), outputs), np.float32)

    def run(self, native: Library, turn: int, num_rows: int, num_threads: int) -> None:
        phases, matrix = counters(1), self.matrices[turn % len(self.matrices)]

        def work() -> None:  # holds the counters: a helper may come when the others are done
            native.product(
                phases.ctypes.data, matrix.ctypes.data, self.blocks.ctypes.data, num_rows, self.groups, self.tiles,
                self.out.ctypes.data, self.out.shape[1], 0,
            )  # fmt: skip

        team(num_threads).run(work)

    def read(self, native: Library, turn: int, num_threads: int) -> None:
        """The same bytes, only read: a part by each thread."""
        weights, phases = self.weights[turn % len(self.weights)], counters(1)
        num_jobs = 8 * num_threads
        part = len(weights) // num_jobs
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    job = int(phases[0])
                    phases[0] += 1
                if job >= num_jobs:
                    break
                native.read(weights.ctypes.data + job * part, part)
                with lock:
                    phases[8] += 1
            while phases[8] < num_jobs:
                time.sleep(0)

        team(num_threads).run(work)


def measure(native: Library, product: Product, num_threads: int, turns: int = _TURNS) -> dict[int, float]:
    """Seconds per number of rows, the fastest of ``turns`` turns; of 0 rows: only reading the weights."""
    best: dict[int, float] = dict.fromkeys((0, *NUM_ROWS), float("inf"))
    turn = 0
    for _ in range(turns):
        for rows in best:
            turn += 1
            best[rows] = min(best[rows], _seconds(product, native, turn, rows, num_threads))
    return best


def _seconds(product: Product, native: Library, turn: int, rows: int, num_threads: int) -> float:
    work: Callable[[], None]
    if rows:
        work = lambda: product.run(native, turn, rows, num_threads)  # noqa: E731
    else:
        work = lambda: product.read(native, turn, num_threads)  # noqa: E731
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    native = library()
    for num_threads in NUM_THREADS:
        table = Table(title=f"{native.kind}, {num_threads} thread{'s' * (num_threads > 1)}")
        table.add_column("weights")
        for heading in ("memory GB/s", *(f"{rows} row{'s' * (rows > 1)} GB/s" for rows in NUM_ROWS), "8 / 1", "16 / 1"):
            table.add_column(heading, justify="right")
        for bits in (4, 8):
            for outputs, inputs in SHAPES:
                product = Product(outputs, inputs, bits)
                seconds = measure(native, product, num_threads)
                speeds = [product.weights[0].nbytes / seconds[0] / 1e9]
                speeds += [product.num_bytes / seconds[rows] / 1e9 for rows in NUM_ROWS]
                ratios = [seconds[rows] / seconds[1] for rows in (8, 16)]
                table.add_row(
                    f"int{bits} {outputs} x {inputs}", *(f"{x:.1f}" for x in speeds), *(f"{x:.2f}" for x in ratios)
                )
        Console().print(table)


if __name__ == "__main__":
    main()
