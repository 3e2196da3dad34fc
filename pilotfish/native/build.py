"""From the C++ files beside this one to a shared library: which compiler, which instructions, which name.

It does not know where libraries are kept or what they compute. The one trick: the name of a build is a hash of all that
could change its bytes (sources, compiler, flags, machine), so a build is never stale and never another CPU's.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError

SOURCES = Path(__file__).parent
LIBRARY = "kernels.so"
_COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract=off: a product and a sum stay two roundings unless written as one. Never -ffast-math: it would let a
# row's result depend on how many rows there are.
_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-w",
          "-ffp-contract=off", "-fno-math-errno")  # fmt: skip
_SECONDS = 600
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
KINDS: Mapping[str, tuple[str, ...]] = {  # fastest first
    "vnni512": ("-O3", *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    "vnni256": ("-O3", *_AVX2, "-mavxvnni"),
    "avx2": ("-O3", *_AVX2),
    "neon": ("-O2",),  # untested
    "plain": ("-O2",),
}
_NEEDED = {
    "vnni512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"),
    "vnni256": ("avx2", "fma", "f16c", "avxvnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "plain": (),
}


class BuildError(ModelError):
    """There is no compiler, or it fails. ``output``: all that it said."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be run. kind: of `KINDS`. compiler: its path and what it says of itself."""

    kind: str
    compiler: str
    version: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """Identifies the bytes that would come out."""
        told = [self.version, *self.flags, platform.system(), platform.machine()]
        told += [f"{path.name} {path.read_text(encoding='utf-8')}" for path in sorted(sources())]
        return f"kernels-{self.kind}-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"


def sources() -> list[Path]:
    return [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]


def kinds(features: Mapping[str, bool], machine: str = "") -> list[str]:
    """The kinds that a CPU with these features (LLVM's names) can run, fastest first. machine: `platform.machine`'s
    name of it, this one's by default."""
    machine = (machine or platform.machine()).lower()
    if machine in ("aarch64", "arm64"):
        return ["neon"]
    if machine not in ("x86_64", "amd64"):
        return ["plain"]
    return [kind for kind, needed in _NEEDED.items() if all(features.get(name, False) for name in needed)]


def plan(kind: str, extra: tuple[str, ...] = ()) -> Plan:
    """How to build this kind here; $CXX names the compiler, else the first one found. Raises BuildError without one."""
    if os.name != "posix":
        raise BuildError("the C++ kernels are built on Linux and macOS only")
    named = os.environ.get("CXX", "").split()
    found = shutil.which(named[0]) if named else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        wanted = f"$CXX is {named[0]!r}, which is not there" if named else f"none of {', '.join(_COMPILERS)} is there"
        raise BuildError(f"no C++ compiler: {wanted}")
    command = (found, *named[1:])
    version = _run([*command, "--version"])
    return Plan(kind, found, version, (*named[1:], *_FLAGS, *KINDS[kind], *extra))


def compile_into(folder: Path, how: Plan) -> None:
    """Write the library into a folder. Raises BuildError with the compiler's own words if it fails."""
    command = [how.compiler, *how.flags, str(SOURCES / "pass.cpp"), "-o", str(folder / LIBRARY)]
    said = _run(command)
    if not (folder / LIBRARY).is_file():
        raise BuildError(f"{how.compiler} made no library", f"$ {' '.join(command)}\n{said}")


def _run(command: list[str]) -> str:
    told = f"$ {' '.join(command)}\n"
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}", f"{told}{error}\n") from error
    if done.returncode:
        raise BuildError(
            f"{command[0]} failed with exit status {done.returncode}",
            f"{told}{done.stdout}{done.stderr}exit status {done.returncode}\n",
        )
    return done.stdout
