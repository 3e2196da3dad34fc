"""Vector instructions for compiled loops: a thin layer over llvmlite, so that the machine code is ours, not a guess.

It does not know models or attention. The one trick: an auto-vectoriser may treat a loop's tail, or another number of
rows, differently, and then a sum is rounded differently; here each operation on 16 lanes is written out, so a row's
arithmetic is the same whoever its neighbours are.

Memory is given by address (int64). Vectors have 16 lanes of 32 bits, whatever the machine's registers hold.
"""

import inspect
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
V8, VI, VF = ir.VectorType(I8, LANES), ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)

Int = Any  # an int64 in compiled code: a number or an address; numba's and Python's int are not one type

DotKind = Literal["vnni512", "vnni256", "avx2", "plain"]


def dot_kinds() -> list[DotKind]:
    """The ways this CPU can multiply bytes, fastest first. All give the same integers."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["plain"]
    has = llvmlite.binding.get_host_cpu_features()
    found: list[tuple[DotKind, bool]] = [
        ("vnni512", has.get("avx512vnni", False)),
        ("vnni256", has.get("avxvnni", False) or (has.get("avx512vnni", False) and has.get("avx512vl", False))),
        ("avx2", has.get("avx2", False)),
        ("plain", True),
    ]
    return [kind for kind, there in found if there]


DOT_KIND: DotKind = dot_kinds()[0]
_COMPILED_FILES = (
    "attention/vectors.py",
    "attention/compiled.py",
    "models/products.py",
    "models/rowwise.py",
    "models/team.py",
    "models/loops.py",
    "models/linear.py",
)
_PAUSE = platform.machine().lower() in ("x86_64", "amd64")


class Emit:
    """Writes instructions at the place where ``builder`` stands."""

    def __init__(self, builder: Any):
        self.builder = builder

    # -- memory --------------------------------------------------------------------------------------------------

    def at(self, address: Any, offset: Any = 0) -> Any:
        """address + offset, in bytes."""
        if isinstance(offset, int):
            return self.builder.add(address, I64(offset)) if offset else address
        return self.builder.add(address, offset)

    def load(self, address: Any, kind: Any, offset: Any = 0) -> Any:
        value = self.builder.load(self.builder.inttoptr(self.at(address, offset), kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        pointer = self.builder.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.builder.store(value, pointer).align = 1

    def times(self, count: Any, factor: int) -> Any:
        return self.builder.mul(count, I64(factor))

    def variable(self, value: Any) -> Any:
        """A place for a value that a loop changes, set here and now; LLVM turns it into a register."""
        return cgutils.alloca_once_value(self.builder, value)  # type: ignore[no-untyped-call]

    def loop(self, count: Any) -> Any:
        """``with loop(count) as index``, an int64 from 0."""
        return _Loop(self.builder, count)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        kind = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value, I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def pick(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes of a (0..n-1) and b (n..2n-1), in this order."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", VF, a, b, c)

    def constant(self, value: float) -> Any:
        return ir.Constant(VF, [value] * LANES)

    def largest(self, a: Any, b: Any) -> Any:
        """The larger of two, NaN if one is NaN."""
        return self.call("llvm.maximum.v16f32", VF, a, b)

    def magnitude(self, a: Any) -> Any:
        return self.call("llvm.fabs.v16f32", VF, a)

    def whole(self, a: Any) -> Any:
        """Rounded to the nearest integer, still a float."""
        return self.call("llvm.roundeven.v16f32", VF, a)

    def reduce(self, vector: Any, step: Callable[[Any, Any], Any]) -> Any:
        """All lanes into one scalar, halves upon halves: a fixed order."""
        width = LANES // 2
        while width:
            vector = step(vector, self.pick(vector, vector, [(i + width) % LANES for i in range(LANES)]))
            width //= 2
        return self.builder.extract_element(vector, I32(0))

    def total(self, vector: Any) -> Any:
        add = self.builder.add if vector.type == VI else self.builder.fadd
        return self.reduce(vector, add)

    def exp(self, x: Any) -> Any:
        """e to the x, to 2 units in the last place; 0 below -87; NaN stays NaN. The Cephes polynomial."""
        b = self.builder
        low = b.fcmp_ordered("<", x, self.constant(-87.0))
        x = b.select(low, self.constant(-87.0), x)
        x = b.select(b.fcmp_ordered(">", x, self.constant(88.0)), self.constant(88.0), x)
        n = self.whole(b.fmul(x, self.constant(1.4426950408889634)))
        r = self.fma(n, self.constant(-0.693359375), x)
        r = self.fma(n, self.constant(2.12194440e-4), r)
        p = self.constant(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
            p = self.fma(p, r, self.constant(c))
        n = b.select(b.fcmp_unordered("uno", x, x), self.constant(0.0), n)
        shifted = b.shl(b.fptosi(n, VI), ir.Constant(VI, [23] * LANES))
        p = b.bitcast(b.add(b.bitcast(p, VI), shifted), VF)
        return b.select(low, self.constant(0.0), p)

    def dot_bytes(self, sums: Any, unsigned: Any, signed: Any, kind: DotKind) -> Any:
        """sums + the products of 4 unsigned and 4 signed bytes in each 32-bit lane, summed. Exact: never saturates."""
        b = self.builder
        if kind == "vnni512":
            return self.call("llvm.x86.avx512.vpdpbusd.512", VI, sums, unsigned, signed)
        if kind == "plain":
            for byte in range(4):
                u = b.and_(b.lshr(unsigned, ir.Constant(VI, [8 * byte] * LANES)), ir.Constant(VI, [255] * LANES))
                s = b.ashr(b.shl(signed, ir.Constant(VI, [24 - 8 * byte] * LANES)), ir.Constant(VI, [24] * LANES))
                sums = b.add(sums, b.mul(u, s))
            return sums
        halves = []
        for half in (range(8), range(8, 16)):
            c, u, s = (self.pick(v, v, list(half)) for v in (sums, unsigned, signed))
            if kind == "vnni256":
                halves.append(self.call("llvm.x86.avx512.vpdpbusd.256", c.type, c, u, s))
            else:
                halves.append(self._multiply_add_words(c, u, s))
        return self.pick(halves[0], halves[1], list(range(LANES)))

    def _multiply_add_words(self, sums: Any, unsigned: Any, signed: Any) -> Any:
        """AVX2: bytes widened to 16 bits first, because the older multiply-add of bytes saturates."""
        b, narrow, words = self.builder, sums.type, ir.VectorType(ir.IntType(16), 16)
        u, s, eight = b.bitcast(unsigned, words), b.bitcast(signed, words), ir.Constant(words, [8] * 16)
        even = b.and_(u, ir.Constant(words, [255] * 16)), b.ashr(b.shl(s, eight), eight)
        odd = b.lshr(u, eight), b.ashr(s, eight)
        for pair in (even, odd):
            sums = b.add(sums, self.call("llvm.x86.avx2.pmadd.wd", narrow, *pair))
        return sums


class _Loop:
    def __init__(self, builder: Any, count: Any):
        self._range = cgutils.for_range(builder, count, intp=I64)

    def __enter__(self) -> Any:
        return self._range.__enter__().index

    def __exit__(self, *error: Any) -> Any:
        return self._range.__exit__(*error)


def instruction(result: Any, write: Callable[..., Any]) -> Any:
    """A numba intrinsic: float arguments are float32, all others int64; ``write(emit, *args)`` returns its value
    (None where ``result`` is `types.void`)."""

    def emit(_context: Any, *given: Any) -> tuple[Any, Any]:
        kinds = [types.float32 if isinstance(kind, types.Float) else types.int64 for kind in given]

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = write(Emit(builder), *args)
            return context.get_dummy_value() if value is None else value

        return result(*kinds), generate

    # numba wants to see each argument by name; `write` has them, its own first one standing for the context.
    emit.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
    return intrinsic(emit)


def _fingerprint() -> tuple[tuple[str, int, int], ...]:
    package = Path(__file__).resolve().parent.parent
    stats = [(name, (package / name).stat()) for name in _COMPILED_FILES if (package / name).is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


_FINGERPRINT = _fingerprint()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, without Python's lock, and keep the machine code on disk.

    numba looks for changes only in the function's own file; but what is inlined from here or from another of our files
    would then be stale without a word. So all of them count.
    """
    dispatcher: Any = njit(nogil=True, cache=True)(function)
    dispatcher._cache._cache_file._source_stamp = _FINGERPRINT
    return dispatcher


def _add_atomically(emit: Emit, address: Any, value: Any) -> Any:
    return emit.builder.atomic_rmw("add", emit.builder.inttoptr(address, I64.as_pointer()), value, "acq_rel")


def _read_atomically(emit: Emit, address: Any) -> Any:
    return emit.builder.load_atomic(emit.builder.inttoptr(address, I64.as_pointer()), "acquire", 8)


def _pause(emit: Emit) -> None:
    if _PAUSE:
        emit.call("llvm.x86.sse2.pause", ir.VoidType())


def _get_float(emit: Emit, address: Any) -> Any:
    return emit.load(address, F32)


def _set_float(emit: Emit, address: Any, value: Any) -> None:
    emit.store(value, address)


def _get_int(emit: Emit, address: Any) -> Any:
    return emit.load(address, I64)


add_atomically = instruction(types.int64, _add_atomically)  # (address, value) -> what was there before
read_atomically = instruction(types.int64, _read_atomically)
pause = instruction(types.void, _pause)
get_float = instruction(types.float32, _get_float)
set_float = instruction(types.void, _set_float)
