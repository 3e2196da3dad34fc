"""The record: nothing is measured twice, and whatever ends a run leaves a record that a run goes on from."""

from pathlib import Path

import pytest

from pilotfish.errors import OptionError
from pilotfish.reproduce.journal import Journal


def test_a_value_is_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "r.jsonl", []

    def measure() -> dict[str, object]:
        calls.append(1)
        return {"a": (1, 2)}

    first = Journal(path).once("k", measure)
    assert first == {"a": [1, 2]}, "a first run sees what later ones will read"
    again = Journal(path)
    assert again.once("k", measure) == first
    assert len(calls) == 1
    again.once("other", measure)
    assert len(calls) == 2
    assert list(Journal(path).values) == ["k", "other"]


def test_what_fails_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Journal(path).once("k", _interrupt)
    assert Journal(path).values == {}


def _interrupt() -> object:
    raise KeyboardInterrupt


def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Journal(path).once("a", lambda: 1)
    with path.open("a") as file:
        file.write('{"key": "b", "va')
    journal = Journal(path)
    assert journal.values == {"a": 1}
    journal.once("b", lambda: 2)
    assert Journal(path).values == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"key": "a"}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match="no record of measurements"):
        Journal(path)
