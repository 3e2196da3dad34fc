"""The kernels' tests, with every address and every undefined operation watched: what `make test-native` runs.

It does not know the tests. The one trick: the sanitizers' libraries must be there before Python is, so this builds the
kernels with a compiler command that asks for them, then starts Python once more with those libraries loaded first.

    python -m tests.native.sanitized [more arguments of pytest]
"""

import os
import subprocess
import sys

import llvmlite.binding

from pilotfish.models.kernels import built
from pilotfish.native.build import kinds

TESTS = ("tests/native", "tests/models/test_kernels.py")
_WATCHED = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"


def main() -> int:
    compiler = os.environ.get("CXX", "c++")
    words = compiler.split()
    found = [
        subprocess.run([*words, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
        for name in ("asan", "ubsan")
    ]
    os.environ["CXX"] = f"{compiler} {_WATCHED}"
    for kind in kinds(llvmlite.binding.get_host_cpu_features()):
        built(kind)  # here: a compiler that is watched itself takes minutes
    environment = os.environ | {
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    arguments = [*TESTS, *sys.argv[1:]]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
