"""TextStore: what a target said, as token ids on disk; append-only, and whole after a kill at any moment.

It does not know models or prompts. The one trick: a record is one write of [length, checksum, payload], so whatever a
kill or a full disk leaves behind is a torn tail, which the next start cuts off; nothing before it is ever touched.

    folder    store.json                       whose text it is
              00000.text, 00001.text, ...      records; a new file every 32 MB
    payload   [length of header: uint16] [header: JSON] [ids: uint32 ...]     little-endian

Two texts with the same ids are kept once. A prompt's hash decides whether its texts are for training or held out, so a
prompt is never on both sides, whatever was collected before.
"""

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from ..errors import OptionError, PilotfishError

_PREFIX = struct.Struct("<II")  # bytes of payload, their CRC-32
_LONGEST = 1 << 26
_FILE_BYTES = 32 << 20
_SYNC_SECONDS = 5.0
_ABOUT = "store.json"


@dataclass(frozen=True, slots=True)
class Text:
    """One text: a prompt and the target's answer.

    ids: both, end to end. num_prompt: how many are the prompt's. kind: which sort of prompt. number: the prompt's place
    in the plan, so that a later start does not ask again. ended: whether the target ended it itself.
    """

    ids: tuple[int, ...]
    num_prompt: int
    kind: str = ""
    number: int = -1
    temperature: float = 0.0
    ended: bool = True

    @property
    def num_answer(self) -> int:
        return len(self.ids) - self.num_prompt

    def pack(self) -> bytes:
        """The record's payload."""
        header = {name: value for name, value in asdict(self).items() if name != "ids"}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        return struct.pack("<H", len(encoded)) + encoded + np.array(self.ids, "<u4").tobytes()

    @classmethod
    def unpack(cls, payload: bytes) -> "Text":
        """Raises ValueError, KeyError or TypeError for what `pack` never wrote."""
        (length,) = struct.unpack_from("<H", payload)
        header = json.loads(payload[2 : 2 + length])
        ids = np.frombuffer(payload[2 + length :], "<u4").tolist()
        return cls(ids=tuple(ids), **header)


@dataclass(slots=True)
class Found:
    """What opening met. torn_bytes: cut off the end. duplicates: texts that were there already."""

    torn_bytes: int = 0
    duplicates: int = 0


class TextStore:
    """Texts in a folder; open it once, with ``with``: a second process is refused.

    about: whose text it is; a folder of another's is refused with an OptionError. Raises PilotfishError if the disk is
    full or broken; what was appended before stays.
    """

    def __init__(self, folder: str | Path, about: dict[str, Any]):
        self.folder = Path(folder)
        self.about = about
        self.found = Found()
        self.texts: list[Text] = []
        self.num_tokens = 0  # of all answers
        self._known: set[bytes] = set()
        self._file = -1
        self._size = 0
        self._number = 0
        self._synced = time.monotonic()
        self._lock = filelock.FileLock(str(self.folder / "store.lock"))

    def __enter__(self) -> "TextStore":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise OptionError(f"another process is collecting into {self.folder}; wait for it, or stop it") from None
        except OSError as error:
            raise OptionError(f"{self.folder} cannot be used: {error.strerror}") from error
        try:
            self._check_about()
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)
                self._file = -1
        self._lock.release()

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """The first prompt of the plan that no text here is an answer to."""
        return 1 + max((text.number for text in self.texts), default=-1)

    def _check_about(self) -> None:
        path = self.folder / _ABOUT
        if not path.exists():
            write_whole(path, json.dumps(self.about, indent=1).encode())
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"{path} cannot be read ({error}); give another folder") from error
        for key, value in self.about.items():
            if found.get(key) != value:
                raise OptionError(
                    f"the texts in {self.folder} are of another target: {key} {found.get(key)!r}, not {value!r}; give "
                    "another folder"
                )

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9][0-9][0-9][0-9][0-9].text"))

    def _read(self) -> None:
        paths = self._paths()
        for path in paths:
            size = path.stat().st_size
            end = 0
            for end, text in _records(path):  # noqa: B007 -- its last value is wanted
                self._remember(text)
            if end < size:
                # Only a kill's torn tail is expected, and only in the last file. Elsewhere the rest of a damaged file
                # is lost too, for nothing says where the next record begins; the other files are not.
                self.found.torn_bytes += size - end
                if path == paths[-1]:
                    os.truncate(path, end)
        self._number = int(paths[-1].stem) if paths else 0

    def _remember(self, text: Text) -> bool:
        digest = _digest(text.ids)
        if digest in self._known:
            self.found.duplicates += 1
            return False
        self._known.add(digest)
        self.texts.append(text)
        self.num_tokens += text.num_answer
        return True

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, text: Text) -> bool:
        """Keep a text; False if it is there already. On disk for good within some seconds (see `sync`).

        Raises PilotfishError if it cannot be written; then it is not kept, and all before it is.
        """
        if _digest(text.ids) in self._known:
            self.found.duplicates += 1
            return False
        payload = text.pack()
        record = _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            self._open()
            _write_all(self._file, record)
        except OSError as error:
            if self._file >= 0:
                os.ftruncate(self._file, self._size)  # shrinking needs no space
            raise PilotfishError(
                f"{self.folder}: {error.strerror}; {len(self.texts)} texts ({self.num_tokens} tokens) are kept. Make "
                "room and start again with the same folder"
            ) from error
        self._size += len(record)
        self._remember(text)
        self.sync()
        return True

    def sync(self, force: bool = False) -> None:
        """Make what was appended outlive a crash of the machine, if the last time is some seconds ago."""
        now = time.monotonic()
        if self._file >= 0 and (force or now - self._synced > _SYNC_SECONDS):
            os.fsync(self._file)
            self._synced = now

    def _open(self) -> None:
        if self._file >= 0 and self._size >= _FILE_BYTES:
            os.fsync(self._file)
            os.close(self._file)
            self._file, self._number = -1, self._number + 1
        if self._file < 0:
            path = self.folder / f"{self._number:05d}.text"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._file).st_size


@dataclass(slots=True)
class Split:
    """Texts for training and those held out, each in the order in which they were collected."""

    train: list[Text] = field(default_factory=list)
    held_out: list[Text] = field(default_factory=list)


def split(texts: Sequence[Text], holdout: float) -> Split:
    """By the prompt's hash; ``holdout`` is the share held out."""
    parts = Split()
    for text in texts:
        place = int.from_bytes(_digest(text.ids[: text.num_prompt]), "little") / 2**64
        (parts.held_out if place < holdout else parts.train).append(text)
    return parts


def write_whole(path: Path, data: bytes) -> None:
    """A file that is either the old one or the new one, never a part. Raises OSError, and then it is the old one."""
    partial = path.with_name(path.name + ".partial")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _records(path: Path) -> Iterator[tuple[int, Text]]:
    """(where the record ends, its text), up to the first that is not whole."""
    place = 0
    with path.open("rb") as file:
        while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
            length, checksum = _PREFIX.unpack(prefix)
            if length > _LONGEST:
                return
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != checksum:
                return
            try:
                text = Text.unpack(payload)
            except (ValueError, KeyError, TypeError, struct.error):
                return
            place += _PREFIX.size + length
            yield place, text


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(ids, "<u4").tobytes(), digest_size=8).digest()
