"""Folders that are expensive to make, kept in the user's cache and never trusted blindly.

Does not know what is in them: the caller passes a function that fills an empty folder.
The one trick: a folder is filled under another name and renamed when complete, with the checksums of its files inside,
so what carries the final name is whole however the process died, and what was changed afterwards is noticed and made
again.

Checksums of gigabytes take longer than all the rest of a start. So what was checked in full is remembered with each
file's size, times and inode, and checked again when one of them differs: any write, copy or restore since. What that
does not notice is a disk that gives other bytes for a file that nobody has written to; with checked.json deleted, all
is read again.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable

import filelock

from ..errors import ModelError

RECORD = "checksums.json"
CHECKED = "checked.json"
_SETTLED_SECONDS = 2.0  # a file younger than that may be written again with the same time: it is not remembered


def cache_folder() -> pathlib.Path:
    """Where we keep what can be remade: $PILOTFISH_CACHE, else $XDG_CACHE_HOME/pilotfish, else ~/.cache/pilotfish."""
    named = os.environ.get("PILOTFISH_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if named:
            return pathlib.Path(named).expanduser()
        # The XDG standard says that a relative path there is to be ignored.
        base = pathlib.Path(shared) if os.path.isabs(shared) else pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise ModelError(f"no home folder to keep the cache in ({error}); set PILOTFISH_CACHE to a folder") from error
    return base / "pilotfish"


def prepared(name: str, fill: Callable[[pathlib.Path], None], say: Callable[[str], None]) -> pathlib.Path:
    """The cache's folder `name`, first made by `fill(empty folder)` if it is missing or damaged.

    Safe with several processes: one fills, the others wait for it. `say` is told what an onlooker should know.
    """
    folder = cache_folder() / name
    if damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            lock.acquire(timeout=1)
        except filelock.Timeout:
            say(f"another process is preparing {folder}; waiting for it")
            lock.acquire()
        try:
            _make(folder, fill, say)
        except BaseException:
            if not folder.exists():
                _remove(lock)
            raise
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(f"cannot prepare {folder}: {error}; PILOTFISH_CACHE can name another place") from error
    return folder


def drop(folder: pathlib.Path) -> None:
    """Delete a prepared folder, or what a killed process left of it, with its lock; not while somebody is at work."""
    with contextlib.suppress(OSError, filelock.Timeout), (lock := _lock(folder)).acquire(timeout=0):
        for path in (folder, _partial(folder)):
            shutil.rmtree(path, ignore_errors=True)
        _remove(lock)


def _lock(folder: pathlib.Path) -> filelock.FileLock:
    return filelock.FileLock(folder.with_name(folder.name + ".lock"))


def _remove(lock: filelock.FileLock) -> None:
    """Delete the file of a lock that we hold and let go of next. Somebody may have opened it to wait for us, and others
    may make a new one meanwhile; but who then locks a file that has no name any more looks for the new one: `filelock`
    does so, from 4 at the latest."""
    with contextlib.suppress(OSError):  # Windows keeps files that are open
        pathlib.Path(lock.lock_file).unlink()


def _partial(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(folder.name + ".partial")


def damage(folder: pathlib.Path) -> str | None:
    """What is wrong with a prepared folder, in words; None if every file is as it was written.

    Reads everything (a second for a gigabyte) unless it did so before and the files look untouched since.
    """
    if not folder.is_dir():
        return "it is missing"
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files = [(str(name), int(entry["bytes"]), str(entry["sha256"])) for name, entry in record["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{RECORD} cannot be read"
    for name, size, _ in files:  # all the cheap checks before the first expensive one
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    # Before reading: what is written meanwhile will look different.
    looks = _looks(folder, [RECORD, *(name for name, _, _ in files)])
    if _checked(folder) == looks:
        return None
    for name, _, checksum in files:
        if sha256(folder / name) != checksum:
            return f"{name} does not match its checksum"
    _remember_check(folder, looks)
    return None


def _looks(folder: pathlib.Path, names: list[str]) -> dict[str, list[int]]:
    """Per file what changes with any write to it, at the price of a look at its directory entry."""
    stats = {name: (folder / name).stat() for name in names}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats.items()}


def _checked(folder: pathlib.Path) -> object:
    try:
        return json.loads((folder / CHECKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _remember_check(folder: pathlib.Path, looks: dict[str, list[int]]) -> None:
    newest = max(time_ns for _, *times, _ in looks.values() for time_ns in times)
    if time.time_ns() - newest < _SETTLED_SECONDS * 1e9:
        return
    scratch = folder / f"{CHECKED}.{os.getpid()}"
    try:
        scratch.write_text(json.dumps(looks) + "\n", encoding="utf-8")
        scratch.replace(folder / CHECKED)
    except OSError:  # a cache that we may only read is checked in full each time
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def sha256(path: pathlib.Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(folder: pathlib.Path, fill: Callable[[pathlib.Path], None], say: Callable[[str], None]) -> None:
    """Fill and rename, with the lock held."""
    reason = damage(folder)  # again: another process may have made it while we waited
    if reason is None:
        return
    if folder.exists():
        say(f"{folder} is damaged ({reason}); making it again")
    partial = _partial(folder)
    if partial.exists():  # left by a process that was killed: nobody else can be writing, we hold the lock
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        fill(partial)
        files = {
            path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        (partial / RECORD).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # only there if something failed: 540 MB are not left behind
