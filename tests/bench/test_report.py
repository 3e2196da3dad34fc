"""What people see, on rows made up by hand: the table, its notes, and the picture."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pilotfish.bench import environment
from pilotfish.bench.plot import check, draw
from pilotfish.bench.progress import Progress
from pilotfish.bench.report import document, print_report
from pilotfish.bench.results import AUTO, Divergence, Report, Row
from pilotfish.errors import OptionError

PLAIN = Row(
    method="none",
    category="all",
    temperature=0.0,
    tokens_per_second=20.0,
    speedup=1.0,
    mean_acceptance_length=1.0,
    acceptance_by_position=[],
    alpha=None,
    c=None,
    predicted_speedup=1.0,
    identical=True,
    divergences=[],
)
DRAFTED = replace(
    PLAIN,
    method="ngram",
    tokens_per_second=30.0,
    speedup=1.5,
    acceptance_by_position=[0.8, 0.7],
    alpha=0.75,
    c=0.001,
    predicted_speedup=1.9,
    predicted_speedup_measured_verify=1.6,
    speedup_spread=(1.1, 1.8),
    num_speculative_tokens=4,
    time_to_first_token=0.25,
    verify_ratio=1.3,
)
SETTINGS = {"repeats": 3, "concurrency": 1, "temperature": 0.0}


def report(*rows: Row, **others: Any) -> Report:
    return Report(list(rows), {"model": "m", "dtype": "float32", "num_prompts": 4, "settings": SETTINGS} | others)


def shown(given: Report, width: int = 140) -> list[str]:
    file = io.StringIO()
    print_report(given, Console(file=file, width=width))
    return file.getvalue().splitlines()


def test_the_table_names_every_figure() -> None:
    text = "\n".join(shown(report(PLAIN, DRAFTED))[:-1])
    for part in ("ngram 4", "1.50 1.10-1.80", "1.90, 1.60", "0.75", "0.001", "1.30", "250 ms", "yes", "plain"):
        assert part in text, part


def test_a_narrow_terminal_shows_less_and_cuts_nothing() -> None:
    *table, last = shown(report(PLAIN, DRAFTED), width=80)
    assert not any("…" in line for line in table)
    assert any("ngram 4" in line and "1.50" in line for line in table)
    assert not any("1.10-1.80" in line for line in table)
    assert len(json.loads(last)["rows"]) == 2


def test_what_went_wrong_is_said() -> None:
    parts = [Divergence(f"line {n}", n, None if n == 3 else 0.5) for n in range(20)]
    bad = replace(DRAFTED, identical=False, divergences=parts, num_failed_drafts=6, drafter="n-grams")
    text = "\n".join(shown(report(PLAIN, bad))[:-1])
    assert "20 differ" in text
    assert "line 2 parts from plain decoding at token 2 (margin 0.5 logits)" in text
    assert "at token 3 (one text ends)" in text
    assert "8 more" in text
    assert "the drafter failed in 6 steps" in text
    assert "ngram: n-grams" in text


def test_with_one_category_all_says_nothing_new() -> None:
    table = shown(report(PLAIN, replace(PLAIN, category="qa"), DRAFTED, replace(DRAFTED, category="qa")))[:-1]
    assert sum("qa" in line for line in table) == 2
    assert not any(" all " in line for line in table)


def test_the_document_is_json_whatever_was_measured() -> None:
    odd = replace(DRAFTED, speedup=float("inf"), c=float("nan"), divergences=[Divergence("line 1", 2, float("-inf"))])
    (row,) = json.loads(shown(report(odd))[-1])["rows"]
    assert row["speedup"] is row["c"] is row["divergences"][0]["margin"] is None
    assert row["divergences"][0] == {"prompt": "line 1", "position": 2, "margin": None}
    assert document(report())["rows"] == []
    assert shown(report())[0] == "nothing was measured"


class Screen(io.StringIO):
    """A terminal, as far as one can tell."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_table_and_a_program_the_document() -> None:
    for file, as_json, table, json_last in (
        (io.StringIO(), False, True, True),
        (Screen(), False, True, False),
        (Screen(), True, False, True),
        (io.StringIO(), True, False, True),
    ):
        print_report(report(PLAIN, DRAFTED), Console(file=file, width=140), as_json=as_json)
        lines = file.getvalue().splitlines()
        assert any("ngram 4" in line for line in lines) is table
        assert lines[-1].startswith('{"rows": ') is json_last
        assert as_json == (len(lines) == 1)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    check(str(path))
    several = [replace(DRAFTED, num_speculative_tokens=k) for k in (8, 2, AUTO)]
    unknown = replace(DRAFTED, method="draft_model", speedup=None, speedup_spread=None, acceptance_by_position=[])
    for rows in ([PLAIN, *several, unknown], [PLAIN, DRAFTED], [PLAIN]):
        path.unlink(missing_ok=True)
        draw(report(*rows), str(path))
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="must name a .png file"):
        check(str(tmp_path / "bench"))
    with pytest.raises(OptionError, match="there is no folder"):
        check(str(tmp_path / "missing" / "bench.png"))
    monkeypatch.setattr("pilotfish.bench.plot.find_spec", lambda _name: None)
    with pytest.raises(OptionError, match="needs matplotlib"):
        check(str(tmp_path / "bench.png"))


def test_progress_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as progress:
        progress.show("plain decoding")
        progress.advance()
    assert capsys.readouterr().out == ""


def test_the_commit_is_known_only_in_a_checkout(tmp_path: Path) -> None:
    assert environment.commit(tmp_path) is None
    (tmp_path / ".git").mkdir()  # not a repository git can read
    assert environment.commit(tmp_path) is None


def test_the_cpu_has_a_name() -> None:
    assert environment.cpu_model()
