"""A built library as Python functions that take numpy arrays and addresses.

It does not know how libraries are built or models laid out. The one trick: a pass is one table of int64, so a call
costs the same for 1 layer and for 30, and ctypes lets go of Python's lock for its length.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError

Array = np.ndarray[Any, Any]
_NUM_THREADS = 0  # a place in the table that the library itself fills
BEST = np.dtype({"names": ["id", "value"], "formats": ["i8", "f4"], "itemsize": 16})  # of a row of logits


def no_best(*shape: int) -> Array:
    """Nothing looked at yet."""
    best = np.zeros(shape, BEST)
    best["id"] = -1
    return best


_INT, _FLOAT, _POINTER, _WORD = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "run_pass": (_POINTER, _INT, _INT),
    "attend": (_POINTER,),
    "products": (_INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _INT, _INT),
    "linear": (_INT, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER),
    "quantise_row": (_POINTER, _INT, _INT, _POINTER),
    "normalise": (_POINTER, _POINTER, _INT, _FLOAT, _POINTER),
    "rotate": (_POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "activate": (_INT, _POINTER, _POINTER, _POINTER, _INT),
    "exponentials": (_POINTER, _WORD, _WORD, _INT, ctypes.c_double, _POINTER),
    "find_best": (_POINTER, _INT, _INT, _POINTER, _INT),
    "unpack_bytes": (_POINTER, _INT, _FLOAT, _INT, _POINTER),
    "unpack_groups": (_POINTER, _POINTER, _INT, _FLOAT, _INT, _POINTER),
    "read": (_INT, _POINTER, _INT, _INT),
}


class Table:
    """The arguments of one pass as the library wants them, in the order of `loops.run_pass`, and the arrays they lie
    in. phases: counters, for parts that are called alone; a whole pass brings its own."""

    def __init__(self, b: Array, sizes: Array, layers: Array, ends: Array, factors: Array,
                 batch: tuple[Array, ...], rows: tuple[Array, ...], num_splits: int,
                 phases: Array | None = None):  # fmt: skip
        tokens, positions, slots, wanted, groups = batch
        prefixes, bits, slot_table = rows
        assert layers.dtype == np.int64 and factors.dtype == np.float32
        layers, ends = np.ascontiguousarray(layers), np.ascontiguousarray(ends)
        parts = (tokens, positions, slots, wanted, groups.ravel(), prefixes, bits, slot_table)
        ints = np.concatenate(parts, dtype=np.int64)  # one array: asking for an address takes longer than copying
        places = [int(ints.ctypes.data)]
        for part in parts:
            places.append(places[-1] + 8 * len(part))
        self._arrays = (phases, b, sizes, layers, ends, factors, ints)
        counters = 0 if phases is None else phases.ctypes.data
        self._table = np.array(
            [counters, *(a.ctypes.data for a in (b, sizes, layers)), len(layers), ends.ctypes.data, factors.ctypes.data,
             *places[:4], len(wanted), places[4], len(groups), *places[5:8], num_splits, len(tokens),
             _NUM_THREADS],
            np.int64)  # fmt: skip

    @property
    def address(self) -> int:
        return int(self._table.ctypes.data)


class Library:
    """One built library. kind: the instructions it was built for."""

    def __init__(self, path: Path):
        try:
            self._handle = ctypes.CDLL(str(path))
            name = self._handle.pf_kind
            for function, arguments in _SIGNATURES.items():
                found = getattr(self._handle, f"pf_{function}")
                found.argtypes, found.restype = arguments, None
                setattr(self, function, found)
        except (OSError, AttributeError) as error:
            raise ModelError(
                f"{path} is not a library of ours ({error}); delete its folder and it is made again"
            ) from error
        name.restype = ctypes.c_char_p
        self.kind: str = name().decode()

    def __getattr__(self, name: str) -> Any:  # the functions of _SIGNATURES, for type checkers
        raise AttributeError(f"the library has no function {name!r}")
