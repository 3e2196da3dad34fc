"""Which code runs a quantised pass: C++ built here (`native`), or numba's compiled loops (`loops`). Same bits.

It does not know models. The one trick: both read the same tables and give the same bits, so the choice is about speed
alone; where the C++ cannot be had the loops run, and one line says so and names the log with the compiler's words.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
from rich.console import Console

from ..decoding.noise import draw_with
from ..errors import ModelError
from ..native.build import LIBRARY, BuildError, compile_into, kinds, plan
from ..native.library import Library, Table
from ..native.noise import exponentials_of
from . import loops
from .disk_cache import cache_folder, prepared
from .options import KERNELS
from .team import counters, team

LOG = "kernels.log"
Run = Callable[..., None]


def runner(kernels: str) -> Run:
    """What runs one pass, given its numbers of threads and phases and the other arguments of `loops.run_pass`. Raises
    ModelError if kernels is ``native`` and they cannot be built or loaded."""
    native = chosen(kernels)
    return _run_numba if native is None else functools.partial(_run_native, native)


def chosen(kernels: str) -> Library | None:
    """The C++ kernels; None where numba's loops are to run. Raises ModelError as `runner` does."""
    assert kernels in KERNELS
    if kernels == "numba":
        return None
    try:
        return library()
    except ModelError as error:
        if kernels == "native":
            raise ModelError(f"kernels 'native' cannot be had: {error}; 'numba' gives the same results") from error
        _say_once(f"The C++ kernels cannot be had ({error}); numba's loops run instead, with the same results")
        return None


def library(kind: str | None = None) -> Library:
    """The kernels for this CPU, built first if they are not in the user's cache. kind: of `native.build.KINDS`, the
    fastest by default. Raises ModelError, naming a log, if that is impossible."""
    kind = kind or kinds(llvmlite.binding.get_host_cpu_features())[0]
    found = _opened(kind, cache_folder(), os.environ.get("CXX"))
    if isinstance(found, ModelError):
        raise found
    return found


@functools.cache
def _opened(kind: str, _cache: Path, _compiler: str | None) -> Library | ModelError:
    """A failure too is remembered: a model and its drafter would each let the compiler fail."""
    try:
        path = built(kind)
        found = Library(path)
    except ModelError as error:
        return error
    if found.kind != kind:
        return ModelError(f"{path} was built for {found.kind} instead of {kind}: the compiler did not take its flags")
    if (draw := exponentials_of(found)) is not None:
        draw_with(draw)
    return found


def built(kind: str) -> Path:
    """The library of this kind in the user's cache, made first if it is not there. Raises ModelError as `library`."""

    def fill(folder: Path) -> None:
        _say("Compiling the kernels for this CPU (only this once)")
        compile_into(folder, how)

    try:
        how = plan(kind)
        return prepared(how.name, fill, _say) / LIBRARY
    except BuildError as error:
        if not error.output:
            raise
        log = cache_folder() / LOG
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(error.output, encoding="utf-8")
        except OSError as trouble:
            raise ModelError(f"{error}, and its words cannot be kept: {trouble}") from error
        raise ModelError(f"{error}; what it said is in {log}") from error


def _run_numba(num_threads: int, num_phases: int, *args: Any) -> None:
    team(num_threads).run(loops.run_pass, counters(num_phases), *args)


def _run_native(native: Library, num_threads: int, num_phases: int, *args: Any) -> None:
    table = Table(*args)  # an address keeps nothing alive
    native.run_pass(table.address, num_threads, num_phases)


@functools.cache
def _say_once(line: str) -> None:
    _say(line)


def _say(line: str) -> None:
    Console(file=sys.stderr).print(line, soft_wrap=True, markup=False, highlight=False)
