"""The store keeps what was appended, whatever ended the process."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import OptionError, PilotfishError
from pilotfish.train import store as module
from pilotfish.train.store import Text, TextStore, split, write_whole
from tests.train.tiny import texts

ABOUT = {"vocab_size": 64}


def opened(folder: Path) -> list[Text]:
    with TextStore(folder, ABOUT) as store:
        return list(store.texts)


def filled(folder: Path, own: list[Text]) -> Path:
    with TextStore(folder, ABOUT) as store:
        for text in own:
            assert store.append(text)
    (path,) = folder.glob("*.text")
    return path


def test_what_was_appended_is_there_again(tmp_path: Path) -> None:
    own = texts(20)
    filled(tmp_path, own)
    with TextStore(tmp_path, ABOUT) as store:
        assert store.texts == own
        assert store.num_tokens == sum(len(text.ids) - text.num_prompt for text in own)
        assert store.next_number == 20
        assert store.found.torn_bytes == 0


def test_any_torn_tail_loses_the_torn_record_alone(tmp_path: Path) -> None:
    own = texts(4)
    path = filled(tmp_path, own)
    whole = path.read_bytes()
    last = len(own[-1].pack()) + 8
    for missing in range(1, last + 1):
        path.write_bytes(whole[: len(whole) - missing])
        with TextStore(tmp_path, ABOUT) as store:
            assert store.texts == own[:3]
            assert store.found.torn_bytes == last - missing
            assert store.append(own[3])
        assert path.read_bytes() == whole


@pytest.mark.parametrize("place", [0, 4, 9, 30])
def test_a_flipped_bit_is_seen(tmp_path: Path, place: int) -> None:
    own = texts(3)
    path = filled(tmp_path, own)
    data = bytearray(path.read_bytes())
    start = len(data) - (len(own[2].pack()) + 8)
    data[start + place] ^= 1
    path.write_bytes(bytes(data))
    assert opened(tmp_path) == own[:2]


def test_damage_in_an_older_file_leaves_the_newer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILE_BYTES", 400)
    own = texts(12)
    with TextStore(tmp_path, ABOUT) as store:
        for text in own:
            store.append(text)
    paths = sorted(tmp_path.glob("*.text"))
    assert len(paths) > 2
    assert opened(tmp_path) == own
    size = paths[0].stat().st_size
    data = bytearray(paths[0].read_bytes())
    data[12] ^= 255
    paths[0].write_bytes(bytes(data))
    found = opened(tmp_path)
    assert 0 < len(found) < len(own)
    assert found == own[len(own) - len(found) :]
    assert paths[0].stat().st_size == size, "only the last file is ever cut"


def test_a_text_is_kept_once(tmp_path: Path) -> None:
    (text,) = texts(1)
    with TextStore(tmp_path, ABOUT) as store:
        assert store.append(text)
        assert not store.append(text)
        assert store.found.duplicates == 1
    assert opened(tmp_path) == [text]


def test_a_full_disk_takes_nothing_of_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, write = texts(3), os.write
    with TextStore(tmp_path, ABOUT) as store:
        store.append(own[0])

        def half(file: int, data: Any) -> int:
            if len(data) > 20:
                return write(file, data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(
            PilotfishError, match=r"No space left on device; 1 texts \(\d+ tokens\) are kept. Make room"
        ):
            store.append(own[1])
        monkeypatch.setattr(os, "write", write)
        assert store.append(own[1]), "the same text, once there is room"
        store.append(own[2])
    assert opened(tmp_path) == own


def test_a_whole_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"new" * 100)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_process_and_another_target_are_refused(tmp_path: Path) -> None:
    with TextStore(tmp_path, ABOUT), pytest.raises(OptionError, match="another process is collecting"):
        TextStore(tmp_path, ABOUT).__enter__()
    with pytest.raises(OptionError, match="vocab_size 64, not 65"):
        TextStore(tmp_path, {"vocab_size": 65}).__enter__()
    assert opened(tmp_path) == [], "a refusal holds no lock"


def test_a_prompt_is_on_one_side_whatever_its_answers() -> None:
    own = texts(300)
    again = [Text((*text.ids[: text.num_prompt], 1, 2, 3), text.num_prompt) for text in own]
    parts, others = split(own, 0.2), split(again, 0.2)
    prompts = {text.ids[: text.num_prompt] for text in parts.held_out}
    assert prompts == {text.ids[: text.num_prompt] for text in others.held_out}
    assert prompts.isdisjoint(text.ids[: text.num_prompt] for text in parts.train)
    assert 30 < len(parts.held_out) < 90
    assert split(own, 0.0).held_out == []
