"""The batch command: answers as the library gives them, errors line by line, and going on after any end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pilotfish import SamplingParams
from pilotfish.cli import main
from pilotfish.engine.engine import Engine
from pilotfish.errors import OptionError, PilotfishError
from pilotfish.server import batch as module
from pilotfish.server.batch import run_batch
from pilotfish.server.options import BatchOptions
from tests.server.fakes import MESSAGES, TOKENIZER, an_llm, expected, table

ROOT = Path(__file__).parents[2]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(number, url=TEXT, **body):
    default = {"prompt": f"line {number}"} if url == TEXT else {"messages": MESSAGES}
    body = default | {"temperature": 0, "max_tokens": 12} | body
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


def write(path, lines):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read(path):
    return {one["custom_id"]: one for one in map(json.loads, path.read_text().splitlines())}


def go(tmp_path, lines, *, llm=None, **options):
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_batch(BatchOptions(**options), source, target, lambda: llm or an_llm(table()))
    found = read(target)
    assert len(target.read_text().splitlines()) == len(found), "an answer came twice"
    return found


def test_answers_are_the_library_s(tmp_path, capsys):
    lines = [line(i, seed=i, temperature=1) for i in range(40)] + [line(99, CHAT)]
    found = go(tmp_path, lines)
    assert set(found) == {one["custom_id"] for one in lines}
    for i in range(40):
        answer = found[f"id-{i}"]
        (wanted,) = expected(f"line {i}", SamplingParams(seed=i, max_tokens=12), table())
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["text"] == wanted.text
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
    (wanted,) = expected(TOKENIZER.chat(MESSAGES), SamplingParams(temperature=0, max_tokens=12), table())
    assert found["id-99"]["response"]["body"]["choices"][0]["message"]["content"] == wanted.text
    assert "41 answers added" in capsys.readouterr().err


def test_many_run_at_once(tmp_path):
    model = table()
    llm = an_llm(model, method="none", max_num_seqs=8)
    go(tmp_path, [line(i, ignore_eos=True) for i in range(16)], llm=llm)
    assert model.num_passes < 16 * 12 / 4


def test_what_is_wrong_with_a_line_is_its_answer(tmp_path, capsys):
    wrong = {
        "id-1": (line(1, temperature=-1), "temperature"),
        "id-2": (line(2, promt="x"), "did you mean 'prompt'"),
        "id-3": (line(3) | {"url": "/v1/completion"}, "did you mean '/v1/completions'"),
        "id-4": (line(4) | {"method": "GET"}, "method must be 'POST'"),
        "id-5": (line(5, stream=True), "not streamed"),
        "id-6": (line(6, model="gpt"), "not served here"),
        "id-7": (line(7) | {"body": [1]}, "must be a JSON object"),
        "id-8": ({"custom_id": "id-8", "method": "POST", "url": TEXT}, "body: this is missing"),
        "id-9": (line(9) | {"boddy": 1}, "boddy: unknown field"),
        "id-10": (line(10, guided_regex="("), "unclosed group"),
        "id-11": (line(11, prompt="x" * 400), "shorten the prompt"),
        "id-12": (line(12, n=1000), "at most 128 completions"),
        "id-13": (line(13) | {"url": 5}, "url must be a text"),
    }
    found = go(tmp_path, [line(0), *(one for one, _ in wrong.values()), line(20, guided_choice=["yes"])])
    assert found["id-0"]["error"] is None
    assert found["id-20"]["response"]["body"]["choices"][0]["text"] == "yes"
    for own, (_, told) in wrong.items():
        answer = found[own]
        assert answer["response"]["status_code"] in (400, 404) and told in answer["error"]["message"], answer
        assert answer["response"]["body"]["error"]["message"] == answer["error"]["message"]
    assert "13 of them errors" in capsys.readouterr().err


def test_a_line_that_breaks_the_pass_is_an_answer_too(tmp_path, caplog):
    model = table()
    model.num_broken = 1
    found = go(tmp_path, [line(i) for i in range(3)], llm=an_llm(model, max_num_seqs=1))
    codes = sorted(answer["response"]["status_code"] for answer in found.values())
    assert codes == [200, 200, 500]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "has no lines"),
        ([line(1), "{"], "line 2 is not JSON: EOF while parsing an object at column 1"),
        ([line(1), "[]"], "line 2 has no custom_id"),
        ([line(1), line(2) | {"custom_id": 5}], "line 2 has no custom_id"),
        ([line(1), line(2), line(1)], "lines 1 and 3 have the same custom_id 'id-1'"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_a_model_is_loaded(tmp_path, lines, told):
    source = write(tmp_path / "in.jsonl", lines)
    with pytest.raises(OptionError) as caught:
        run_batch(BatchOptions(), source, tmp_path / "out.jsonl", lambda: pytest.fail("loaded"))
    assert told in str(caught.value)


def test_other_files_are_not_touched(tmp_path):
    source = write(tmp_path / "in.jsonl", [line(1)])
    with pytest.raises(OptionError, match="both the questions and the answers"):
        run_batch(BatchOptions(), source, source, lambda: pytest.fail("loaded"))
    other = json.dumps({"id": "batch_req_1", "custom_id": "x", "response": {}, "error": None}) + "\n"
    for text, told in (("hello\n", "is no answer of a batch"), (other, "belongs to another batch")):
        target = tmp_path / "out.jsonl"
        target.write_text(text)
        with pytest.raises(OptionError, match=told):
            run_batch(BatchOptions(), source, target, lambda: pytest.fail("loaded"))
        assert target.read_text() == text
    with pytest.raises(OptionError, match="cannot be written"):
        run_batch(BatchOptions(), source, tmp_path / "no" / "out", lambda: pytest.fail("loaded"))
    with pytest.raises(OptionError, match="cannot be read"):
        run_batch(BatchOptions(), tmp_path / "nothing", tmp_path / "out", lambda: pytest.fail("loaded"))


@pytest.mark.parametrize("torn", ["", '{"id": "x", "custom_id": "id-7", "resp', "\xff"])
def test_it_goes_on_where_it_stopped(tmp_path, torn, capsys):
    lines = [line(i) for i in range(8)]
    whole = go(tmp_path, lines)
    target = tmp_path / "out.jsonl"
    kept = target.read_text().splitlines(keepends=True)[:5]
    target.write_text("".join(kept) + torn)
    found = go(tmp_path, lines)
    assert target.read_text().startswith("".join(kept)), "what was there stays as it was"
    assert {own: answer["response"]["body"]["choices"] for own, answer in found.items()} == {
        own: answer["response"]["body"]["choices"] for own, answer in whole.items()
    }
    run_batch(BatchOptions(), tmp_path / "in.jsonl", target, lambda: pytest.fail("loaded"))
    assert "5 of 8 answers are there" in capsys.readouterr().err


def test_two_processes_cannot_write_one_file(tmp_path):
    source = write(tmp_path / "in.jsonl", [line(1)])

    def load():
        with pytest.raises(OptionError, match="another process is writing"):
            run_batch(BatchOptions(), source, tmp_path / "out.jsonl", lambda: pytest.fail("loaded"))
        return an_llm(table())

    run_batch(BatchOptions(), source, tmp_path / "out.jsonl", load)


def test_a_full_disk_ends_it_and_it_goes_on_later(tmp_path, monkeypatch):
    append, count = module._append, [0]

    def full(journal, answer):
        count[0] += 1
        if count[0] > 2:
            journal.write(b'{"torn')
            journal.flush()
            raise OSError(28, "No space left on device")
        append(journal, answer)

    monkeypatch.setattr(module, "_append", full)
    lines = [line(i) for i in range(6)]
    with pytest.raises(OptionError, match="No space left on device; the same command goes on"):
        go(tmp_path, lines)
    monkeypatch.undo()
    assert len(go(tmp_path, lines)) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_stops_answers_nobody(tmp_path, monkeypatch):
    def end(_engine):
        raise SystemExit  # ends the thread, and no more

    monkeypatch.setattr(Engine, "has_work", property(end))
    with pytest.raises(PilotfishError, match="the engine stopped"):
        go(tmp_path, [line(1), line(2)])
    assert (tmp_path / "out.jsonl").read_text() == ""


PROGRAM = """
import sys, time
from tests.server.fakes import an_llm, table
from pilotfish.server.batch import run_batch
from pilotfish.server.options import BatchOptions
model = table()
fast = model.forward
model.forward = lambda *words, **named: (time.sleep(0.004), fast(*words, **named))[1]
run_batch(BatchOptions(), sys.argv[1], sys.argv[2], lambda: an_llm(model, max_num_seqs=2))
"""


def test_after_kill_9_nothing_is_lost_or_doubled(tmp_path):
    lines = [line(i, max_tokens=8, ignore_eos=True) for i in range(60)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    kept = []
    for wanted in (5, 20):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(source), str(target)], cwd=ROOT)
        try:
            deadline = time.monotonic() + 60
            while target.exists() + len(target.read_bytes().splitlines() if target.exists() else []) <= wanted:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        whole = [one for one in target.read_text().splitlines(keepends=True) if one.endswith("\n")]
        assert whole[: len(kept)] == kept and wanted <= len(whole) < 60
        kept = whole
    found = go(tmp_path, lines)
    assert len(found) == 60 and target.read_text().splitlines(keepends=True)[: len(kept)] == kept
    for i in (0, 30, 59):
        (alone,) = expected(f"line {i}", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), table())
        assert found[f"id-{i}"]["response"]["body"]["choices"][0]["text"] == alone.text


def test_the_command(tmp_path):
    result = CliRunner().invoke(main, ["batch", str(tmp_path / "nothing"), str(tmp_path / "out")])
    assert result.exit_code == 2 and "cannot be read" in result.output
    result = CliRunner().invoke(main, ["batch", "--help"])
    assert {"--served-model-name", "--max-completion-tokens", "--method"} <= set(result.output.split())


def test_what_is_not_ours_is_never_cut_or_overwritten(tmp_path):
    """A file without a last newline, one that only looks like answers, and the questions under another name."""
    source = write(tmp_path / "in.jsonl", [line(1)])
    asked = source.read_bytes()
    for content in (b"precious", asked.strip(), asked, b'{"custom_id": ["1"]}\n'):
        target = tmp_path / "precious.txt"
        target.write_bytes(content)
        with pytest.raises(OptionError, match="no answer of a batch"):
            run_batch(BatchOptions(), source, target, lambda: pytest.fail("loaded"))
        assert target.read_bytes() == content
    twin = tmp_path / "twin.jsonl"
    os.link(source, twin)
    with pytest.raises(OptionError, match="both the questions and the answers"):
        run_batch(BatchOptions(), source, twin, lambda: pytest.fail("loaded"))
    assert source.read_bytes() == asked


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_pipes_and_devices_are_refused(tmp_path):
    pipe, source = tmp_path / "pipe", write(tmp_path / "in.jsonl", [line(1)])
    os.mkfifo(pipe)
    for questions, answers in ((pipe, tmp_path / "out.jsonl"), (source, pipe), (source, Path(os.devnull))):
        with pytest.raises(OptionError, match="no regular file"):
            run_batch(BatchOptions(), questions, answers, lambda: pytest.fail("loaded"))


def test_questions_that_vanish_are_told(tmp_path):
    source, target = write(tmp_path / "in.jsonl", [line(1), line(2)]), tmp_path / "out.jsonl"

    def load():
        write(source, [line(1)])
        return an_llm(table())

    with pytest.raises(OptionError, match="1 lines of .* were gone"):
        run_batch(BatchOptions(), source, target, load)
    assert set(read(target)) == {"id-1"}
