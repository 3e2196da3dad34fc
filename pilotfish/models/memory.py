"""A file's bytes in memory that is fast to walk through: pages of 2 MB where the system gives them.

It does not know what the bytes are. The one trick: a pass reads every weight once, and in the 4 KB pages that a mapped
file has, a processor spends a fifth of that time (in a virtual machine) on finding pages. So what is read in every
pass is copied once, at loading, and what hardly ever is (an embedding that is not the head) stays mapped.
"""

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LARGE = 1 << 21  # bytes of a large page
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # of a container: its limit, and what it takes; in the system's new form or its old one
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_SPARE = 1 << 28  # bytes that must be left over


def opened(path: Path, wanted: Sequence[tuple[int, int]]) -> Array:
    """The file's bytes, read-only. wanted: the parts (first byte, end) that every pass reads. Where the system has no
    large pages to give, or too little memory for a copy, all of it is mapped, and nothing but speed is different."""
    mapped = np.memmap(path, np.uint8, mode="r")
    needed = sum(stop - start for start, stop in wanted)
    if needed < LARGE or not _has_room(needed):
        return mapped
    try:
        memory = large(len(mapped))
    except OSError:  # a limit on addresses, or a system that promises no more than it has
        return mapped
    view = memory.data
    with path.open("rb", buffering=0) as file:
        for start, stop in wanted:
            file.seek(start)
            while start < stop and (count := file.readinto(view[start:stop])):
                start += count
            if start < stop:
                raise OSError(f"{path} ends at byte {start}, and {stop} are wanted")
    memory.flags.writeable = False
    return memory


def large(num_bytes: int) -> Array:
    """Zeroes, in large pages if the system gives them; it takes memory for what is written only."""
    if not sys.platform.startswith("linux"):
        return np.zeros(num_bytes, np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _has_room(size: int) -> bool:
    """Whether there are large pages, and this much memory."""
    try:
        if "[never]" in _SWITCH.read_text():
            return False
        free = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable"))
        return min(int(free.split()[1]) * 1024, _left_to_container()) > size + _SPARE
    except (OSError, StopIteration, ValueError, IndexError):
        return False


def _left_to_container() -> float:
    """Bytes; beyond them a process is killed without a word, however much the system has. Files' bytes that are kept in
    memory do not count: they are given up first."""
    for limit, taken, parts in _LIMITS:
        try:
            stat = dict(line.split() for line in (_GROUP / parts).read_text().splitlines())
            used = int((_GROUP / taken).read_text()) - int(stat.get("inactive_file", 0))
            return int((_GROUP / limit).read_text()) - used
        except (OSError, ValueError):  # not there, or "max"
            continue
    return math.inf
