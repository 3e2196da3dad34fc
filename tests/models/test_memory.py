"""Bytes in large pages: the same as the file's, read-only, and from the file itself where there is no room for them."""

import errno
import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.models import memory

SIZE = 3 * memory.LARGE + 100
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="large pages are asked for on Linux only")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random bytes, on a system with large pages and much memory."""
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    switch, free = tmp_path / "enabled", tmp_path / "meminfo"
    switch.write_text("always [madvise] never")
    free.write_text("MemTotal: 1 kB\nMemAvailable:  16000000 kB\n")
    monkeypatch.setattr(memory, "_SWITCH", switch)
    monkeypatch.setattr(memory, "_MEMORY", free)
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "cgroup")
    return path


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def is_mapped(data: memory.Array) -> bool:
    return isinstance(data, np.memmap)


def test_wanted_parts_are_the_file_s(file: Path) -> None:
    wanted = [(64, memory.LARGE + 7), (2 * memory.LARGE, SIZE)]
    data, whole = memory.opened(file, wanted), np.fromfile(file, np.uint8)
    assert not is_mapped(data) and len(data) == SIZE
    assert all(np.array_equal(data[start:stop], whole[start:stop]) for start, stop in wanted)
    assert not data.flags.writeable and data.ctypes.data % 64 == 0
    assert not data[memory.LARGE + 7 : 2 * memory.LARGE].any(), "what nobody wants takes no memory"


@linux
@pytest.mark.parametrize("words", ["MemAvailable: 1000 kB", "MemAvailable: much", "MemAvailable:", ""])
def test_without_room_the_file_is_mapped(file: Path, words: str) -> None:
    memory._MEMORY.write_text(words)
    data = memory.opened(file, [(0, SIZE)])
    assert is_mapped(data) and data.tobytes() == file.read_bytes()


@linux
@pytest.mark.parametrize(
    ("limit", "inactive", "mapped"), [("max", 0, False), ("3000000000", 0, True), ("3000000000", 2 << 30, False)]
)
@pytest.mark.parametrize("form", memory._LIMITS)
def test_a_container_s_limit_counts(file: Path, form: tuple[str, ...], limit: str, inactive: int, mapped: bool) -> None:
    """The system's memory is not the container's: who takes more than that is killed."""
    for name, words in zip(form, (limit, "2900000000", f"anon 5\ninactive_file {inactive}\n"), strict=True):
        (memory._GROUP / name).parent.mkdir(parents=True, exist_ok=True)
        (memory._GROUP / name).write_text(words)
    assert is_mapped(memory.opened(file, [(0, SIZE)])) == mapped


@linux
def test_without_large_pages_the_file_is_mapped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory._SWITCH.write_text("always madvise [never]")
    assert is_mapped(memory.opened(file, [(0, SIZE)]))
    monkeypatch.setattr(memory, "_SWITCH", file.with_name("nothing"))
    assert is_mapped(memory.opened(file, [(0, SIZE)]))


def test_memory_that_is_refused_is_not_needed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a limit on addresses, for one, of which the system's free memory tells nothing."""
    monkeypatch.setattr(memory, "large", refuse)
    data = memory.opened(file, [(0, SIZE)])
    assert is_mapped(data) and data.tobytes() == file.read_bytes()


def test_a_file_that_ends_too_early_is_no_zeroes(file: Path) -> None:
    with pytest.raises(OSError, match=f"ends at byte {SIZE}, and {SIZE + 8} are wanted"):
        memory.opened(file, [(0, SIZE), (SIZE, SIZE + 8)])


@linux
def test_memory_is_given_back(file: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    data = memory.large(32 * memory.LARGE)
    data[:] = 1
    full = resident()
    part = data[:8]
    del data
    assert resident() > full - memory.LARGE, "a part holds the whole"
    del part
    gc.collect()
    assert resident() < full - 30 * memory.LARGE
