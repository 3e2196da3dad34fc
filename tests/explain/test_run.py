"""`pilotfish explain` from the command to the page: one story, told again alike, and no trust in what a model says."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pilotfish import LLM, SamplingParams
from pilotfish.cli import main
from pilotfish.errors import OptionError
from pilotfish.explain.page import page
from pilotfish.explain.run import run_explain
from pilotfish.models.load import Loaded
from tests.fakes import ByteTokenizer, TableModel
from tests.test_cli import model  # noqa: F401 -- a fixture

MARKUP = "<u id=k>&\"'"  # each byte once, so that a table can say it again and again


def an_llm(**options: Any) -> LLM:
    """Says MARKUP for ever."""
    table, said = TableModel(257, order=1, sharpness=1.0), MARKUP.encode()
    for now, after in zip(said, said[1:] + said[:1], strict=True):
        table.table[:, now] = 0
        table.table[:, now, after] = 8
    config = {"method": "ngram", "num_speculative_tokens": 5, "block_size": 4} | options
    return LLM.from_model(Loaded(table, ByteTokenizer()), **config)


def told(llm: LLM, params: SamplingParams, **options: Any) -> tuple[list[Any], str]:
    console = Console(file=io.StringIO(), width=200)
    about = {"prompt": MARKUP, "model": llm.describe()}
    return run_explain(llm, MARKUP * 3, params, about, console=console, **options), console.file.getvalue()  # type: ignore[attr-defined]


def test_an_interrupt_ends_the_story_and_is_no_success(tmp_path: Path) -> None:
    llm, console, path = an_llm(), Console(file=io.StringIO(), width=200), tmp_path / "story.html"
    stream = llm.stream

    def interrupted(*words: Any, **named: Any) -> Any:
        chunks = stream(*words, **named)
        yield next(chunks)
        raise KeyboardInterrupt

    llm.stream = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_explain(
            llm, MARKUP, SamplingParams(max_tokens=9), {"prompt": "", "model": ""}, html=str(path), console=console
        )
    assert path.exists()


class Reader(HTMLParser):
    """All elements and addresses of a page; an end without a beginning fails."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append(tag)
        self.open += [] if tag in ("meta", "br", "link", "img") else [tag]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8}, {"seed": 1}], ids=str)
def test_the_page_is_whole_and_needs_nothing_else(params: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "story.html"
    records, _ = told(an_llm(), SamplingParams(max_tokens=30, **params), html=str(path))
    source = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    assert reader.open == [] and "u" not in reader.elements
    assert len(set(reader.ids)) == len(reader.ids) and {f"pass-{one['pass']}" for one in records} <= set(reader.ids)
    assert all(address.startswith("#") and address[1:] in reader.ids for address in reader.addresses)
    assert not re.findall(r"https?:|url\(|@import", source)
    assert reader.elements.count("svg") == sum(bool(one["nodes"]) for one in records) > 0
    text = "".join(piece for one in records for piece in one["pieces"])
    assert text in "".join(reader.words) and MARKUP in text
    assert MARKUP not in source.replace("&lt;", "")


def test_a_page_without_escapes_would_be_seen() -> None:
    """Negative control: what the model says is an element."""
    reader = Reader()
    with pytest.raises(AssertionError):
        reader.feed(f"<p>{MARKUP}</p>")
    assert "u" in reader.elements


def test_the_same_command_tells_the_same_story() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8)
    assert told(an_llm(), params) == told(an_llm(), params)


def test_the_story_has_each_pass_and_the_sums() -> None:
    records, text = told(an_llm(), SamplingParams(max_tokens=30, temperature=0.8))
    assert re.findall(r"^Pass (\d+)", text, re.M) == [str(one["pass"]) for one in records]
    assert f"30 tokens in {len(records)} passes, {30 / len(records):.2f} a pass" in text
    assert len(records) < 25 and "✓ <" in text and "ngram guessed" in text


def test_a_page_of_nothing_can_be_made() -> None:
    """Interrupted before the first pass."""
    assert "<h1>" in page([], {"prompt": "x", "model": "y"})


def test_what_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere" / "a")
    for option in ("html", "trace"):
        llm = an_llm()
        with pytest.raises(OptionError, match="cannot be written to .*nowhere"):
            told(llm, SamplingParams(), **{option: missing})
        assert not llm.engine.has_work and llm.engine.witness is None
    with pytest.raises(OptionError, match="it is a folder"):
        told(an_llm(), SamplingParams(), html=str(tmp_path))
    with pytest.raises(OptionError, match="one completion, and n is 2"):
        told(an_llm(), SamplingParams(n=2))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


def test_explain_drafts_with_layers_of_the_model_itself(model: str, tmp_path: Path) -> None:  # noqa: F811
    html, trace = tmp_path / "story.html", tmp_path / "trace.jsonl"
    result = run("explain", "abcabc", "-m", model, "--max-tokens", "9", "--html", str(html), "--trace", str(trace))
    assert result.exit_code == 0
    assert "method layer_skip" in result.stderr and "K 4" in result.stderr
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert sum(len(one["ids"]) for one in records) == 9
    assert any(one["drawn"] for one in records) and {one["temperature"] for one in records} == {0.8}
    assert html.read_text(encoding="utf-8").count("<section") == len(records)
    again = run("explain", "abcabc", "-m", model, "--max-tokens", "9", "--method", "ngram", "--temperature", "0")
    assert "method ngram" in again.stderr and "K 4" in again.stderr and "At temperature 0" in again.stdout
    other = run(
        "explain", "abcabc", "-m", model, "--max-tokens", "3", "--speculative-config", '{"num_assistant_tokens": 2}'
    )
    assert "method layer_skip" in other.stderr and "K 2" in other.stderr


def test_generate_writes_the_same_text_with_a_trace(model: str, tmp_path: Path) -> None:  # noqa: F811
    trace = tmp_path / "trace.jsonl"
    words = ("generate", "abcabcabc", "-m", model, "--max-tokens", "12", "--method", "ngram")
    plain = run(*words)
    for more in ((), ("--json",)):
        result = run(*words, *more, "--trace", str(trace))
        records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        text = "".join(piece for one in records for piece in one["pieces"])
        assert result.exit_code == 0 and sum(len(one["ids"]) for one in records) == 12
        assert text == plain.stdout.removesuffix("\n")
    refused = run(*words, "--trace", str(tmp_path / "nowhere" / "a"))
    assert refused.exit_code == 2 and "the trace cannot be written" in refused.stderr
