"""A whole run on engines that count: who runs when, what fails alone, what is kept, and what people see."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from pilotfish.bench.peers import PeersOptions, environments
from pilotfish.bench.peers import engines as engines_module
from pilotfish.bench.peers.__main__ import main
from pilotfish.bench.peers.client import SERVE, Client, WorkerDiedError, WorkerError
from pilotfish.bench.peers.engines import Engine, Process, Variant, table
from pilotfish.bench.peers.journal import Load, Run
from pilotfish.bench.peers.picture import draw, fastest
from pilotfish.bench.peers.report import document, print_report, rows_of
from pilotfish.bench.peers.run import WORKERS, Outcome, pack, run_peers
from pilotfish.bench.peers.task import Task, num_weights, stop_ids
from pilotfish.bench.prompts import BenchPrompt
from pilotfish.errors import OptionError

FAKE = str(Path(__file__).with_name("fake_worker.py"))
PROMPTS = [BenchPrompt(f"p{i}", "ab"[i % 2], (10 * (i + 1), 1)) for i in range(3)]


def engine(name: str, *processes: tuple[str, tuple[Variant, ...]], **options: Any) -> Engine:
    return Engine(
        name, FAKE, None, tuple(Process(name, weights, variants, 1.0) for weights, variants in processes), **options
    )


def task(folder: Path, draft: bool = False, **options: Any) -> Task:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    given = PeersOptions(**{"max_tokens": 12, "threads": 1, "out": str(folder / "peers.json")} | options)
    return Task(
        given, folder / "home", model, model if draft else None, None, PROMPTS, [p.content for p in PROMPTS], (31,)
    )  # type: ignore[misc]


def run(folder: Path, *engines: Engine, draft: bool = False, **options: Any) -> Outcome:
    return run_peers(task(folder, draft, **options), engines, settle=0)


def order(outcome: Outcome) -> list[tuple[int, str, str]]:
    return [(run.prompt, run.engine, run.variant) for run in outcome.journal.runs]


PLAIN, TWICE = Variant(), Variant("twice", {"burst": 2})


@pytest.fixture
def client(tmp_path: Path) -> Any:
    started = Client(Path(sys.executable), Path(FAKE), tmp_path / "log", 2, {})
    yield started
    started.close()


def load(client: Client, **variants: Any) -> None:
    client.ask("load", weights="w", variants=variants)


def test_the_protocol(client: Client) -> None:
    about = client.ask("load", weights="w", variants={"plain": {}, "twice": {"burst": 2}})
    assert (about["version"], about["precision"]) == ("1.2", "w")
    assert about["peak_bytes"] > 1e6
    reply = client.ask("run", variant="twice", ids=[5], max_tokens=6)
    assert reply["ids"] == [5, 6, 7, 8, 9, 10]
    assert [count for _, count in reply["bursts"]] == [1, 2, 2, 1]
    seconds = [second for second, _ in reply["bursts"]]
    assert seconds == sorted(seconds)
    assert 0.002 < seconds[-1] < 1.5


def test_an_error_is_answered_and_the_worker_lives(client: Client) -> None:
    load(client, plain={}, bad={"fails": True})
    with pytest.raises(WorkerError, match="ValueError: cannot"):
        client.ask("run", variant="bad", ids=[5], max_tokens=12)
    assert client.ask("run", variant="plain", ids=[5], max_tokens=2)["ids"] == [5, 6]


def test_death_and_silence_are_told_apart(client: Client, tmp_path: Path) -> None:
    load(client, plain={}, dead={"dies": str(tmp_path / "never")})
    with pytest.raises(WorkerDiedError, match="died with status 3 at 'run': last words"):
        client.ask("run", variant="dead", ids=[5], max_tokens=12)
    silent = Client(Path(sys.executable), Path(FAKE), tmp_path / "log", 1, {})
    load(silent, hang={"hangs": True})
    with pytest.raises(WorkerDiedError, match="no answer to 'run' within 1 s"):
        silent.ask("run", variant="hang", ids=[5], max_tokens=12)


def test_all_take_turns_and_who_begins_moves_on(tmp_path: Path) -> None:
    outcome = run(tmp_path, engine("one", ("w", (PLAIN, TWICE))), engine("two", ("w", (PLAIN,))))
    turns = [("one", "plain"), ("one", "twice"), ("two", "plain")]
    expected = [(p, *turns[(p + i) % 3]) for p in range(3) for i in range(3)]
    assert order(outcome) == expected
    assert not outcome.failures
    assert {run.ids for run in outcome.journal.runs if run.prompt == 1} == {tuple(range(20, 32))}
    assert all(run.rate and run.first_token_seconds and run.peak_bytes > 1e6 for run in outcome.journal.runs)
    assert [run.category for run in outcome.journal.runs[::3]] == ["a", "b", "a"]


def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    dead = Variant("dead", {"dies": str(tmp_path / "never")})
    outcome = run(
        tmp_path,
        engine("lost", ("unloadable", (PLAIN,))),
        engine("one", ("w", (PLAIN, Variant("bad", {"fails": True})))),
        engine("two", ("w", (PLAIN, dead))),
    )
    assert {(run.engine, run.variant): None for run in outcome.journal.runs}.keys() == {
        ("one", "plain"),
        ("two", "plain"),
    }
    assert [run.prompt for run in outcome.journal.runs if run.engine == "one"] == [0, 1, 2]
    failures = dict(outcome.failures)
    assert failures["lost unloadable plain"].startswith("RuntimeError: no such weights (log: ")
    assert "ValueError: cannot" in failures["one w bad"]
    assert "died with status 3" in failures["two w dead"]
    assert failures["two w dead"].endswith("with it went plain")
    assert len(failures) == 3


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    engines = (engine("one", ("w", (PLAIN, Variant("sick", {"dies": str(mended)})))), engine("two", ("w", (PLAIN,))))
    first = run(tmp_path, *engines)
    assert len(first.journal.runs) == 4
    with first.journal.path.open("a") as file:
        file.write('{"run": {"prompt": 2, "cut')  # killed while it wrote
    mended.touch()
    second = run(tmp_path, *engines)
    assert order(second)[:4] == order(first)
    assert sorted(order(second)) == sorted(
        (p, e, v) for p in range(3) for e, v in [("one", "plain"), ("one", "sick"), ("two", "plain")]
    )
    third = run(tmp_path, *engines)
    assert third.journal.runs == second.journal.runs
    assert len(third.journal.loads) == len(second.journal.loads), "nothing was left to do"
    with pytest.raises(OptionError, match="holds a run with max_tokens 12, not 14"):
        run(tmp_path, *engines, max_tokens=14)
    assert len(run(tmp_path, engines[1], max_tokens=14, fresh=True).journal.runs) == 3
    first.journal.path.write_text("[]\n")
    with pytest.raises(OptionError, match="is no record of runs"):
        run(tmp_path, *engines)


def test_interrupted_it_keeps_what_there_is(tmp_path: Path) -> None:
    stopper = Variant("stopper", {"interrupts": os.getpid()})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        outcome = run(tmp_path, engine("one", ("w", (PLAIN, stopper))))
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.interrupted
    assert order(outcome) == [(0, "one", "plain"), (0, "one", "stopper")]
    assert any("interrupted" in line for line in shown(tmp_path, outcome))


def test_engines_that_do_not_fit_are_loaded_in_groups(tmp_path: Path) -> None:
    processes = [Process("e", str(size), (PLAIN,), 1.0) for size in (3, 3, 3, 9, 1)]
    groups = pack(processes, lambda process: float(process.weights), 7)
    assert [[int(p.weights) for p in group] for group in groups] == [[3, 3], [3], [9], [1]]
    outcome = run(tmp_path, engine("one", ("w", (PLAIN,))), engine("two", ("w", (PLAIN,))), memory_gb=0.7)
    assert outcome.groups == [["one w"], ["two w"]]
    assert order(outcome) == [(p, e, "plain") for e in ("one", "two") for p in range(3)]
    assert any("not all fitted" in line for line in shown(tmp_path, outcome))


def test_what_is_missing_is_left_out_by_name(tmp_path: Path) -> None:
    variants = (PLAIN, Variant("drafted", {}, needs_draft=True))
    outcome = run(tmp_path, engine("one", ("w", variants)), engine("two", ("w", (PLAIN,)), needs_gguf=True))
    assert outcome.left_out == [
        "one w drafted: needs --draft-model",
        "two: needs the model as a GGUF file; name it with --gguf",
    ]
    assert {run.variant for run in outcome.journal.runs} == {"plain"}
    again = run(tmp_path, engine("one", ("w", variants)), draft=True, fresh=True)
    assert {run.variant for run in again.journal.runs} == {"plain", "drafted"}


def shown(folder: Path, outcome: Outcome) -> list[str]:
    own, file = task(folder), io.StringIO()
    rows = rows_of(outcome.journal.runs, outcome.journal.loads, own.stop_ids)
    engines = [engine(name, note="a note") for name in ("one", "two")]
    print_report(own, outcome, rows, engines, Console(file=file, width=160))
    return file.getvalue().splitlines()


def test_the_table_and_the_document(tmp_path: Path) -> None:
    other = Variant("other", {"other": 1})
    outcome = run(tmp_path, engine("one", ("w", (PLAIN, TWICE, other))))
    lines = shown(tmp_path, outcome)
    (row,) = [line.split() for line in lines if " other " in line and line.lstrip().startswith("one")]
    assert row[-1] == "33%"  # the first prompt's text alone is plain decoding's
    (row,) = [line.split() for line in lines if line.lstrip().startswith("one") and " twice " in line]
    assert row[-1] == "100%"
    assert "one 1.2: a note" in lines
    assert any("for one w: plain; twice; other" in line for line in lines)
    last = json.loads(lines[-1])
    assert last == json.loads((tmp_path / "peers.json").read_text())
    assert {row["category"] for row in last["rows"]} == {"all", "a", "b"}
    assert last["environment"]["max_tokens"] == 12


def made_up(variant: str, prompt: int, seconds: float, ids: tuple[int, ...] = (1, 2, 3, 4), **others: Any) -> Run:
    bursts = ((0.5, 2), (0.5 + seconds, 2))
    return Run(prompt, "a", "e", "w", variant, bursts, ids, others.get("peak_bytes", 10), 0.0)


def test_rates_and_medians() -> None:
    runs = [
        made_up("plain", 0, 1.0),
        made_up("plain", 1, 2.0),
        made_up("plain", 2, 0.1),
        made_up("fast", 0, 0.5, (1, 2, 3, 4, 9)),
    ]
    (first, *_), (last, _) = (
        rows_of(runs, [Load("e", "w", ("plain", "fast"), 1.0, 5, "1", "w")], (9,))[:2],
        rows_of(runs, [], (9,))[2:],
    )
    assert first.tokens_per_second == pytest.approx(2.0)  # 2 tokens after the first burst, in 1 s; not 4
    assert first.first_token_seconds == 0.5
    assert first.same_text is None
    assert last.same_text == 1.0  # the end token is no difference
    assert rows_of(runs, [], ())[2].same_text == 0.0
    assert (first.over_plain, last.over_plain) == (None, pytest.approx(4.0 / 2.0))
    other = [replace(run, category="b") for run in (made_up("plain", 3, 1.0), made_up("fast", 3, 1.0))]
    overall = [row for row in rows_of([*runs, *other], []) if row.variant == "fast" and row.category == "all"]
    assert overall[0].over_plain == pytest.approx((2.0 + 1.0) / 2)  # a mean over categories, however many prompts
    short = Run(0, "a", "e", "w", "plain", ((0.5, 1),), (1,), 1)
    assert short.rate is None
    assert rows_of([short], [])[0].tokens_per_second is None


def test_the_picture_shows_each_engines_fastest_variant(tmp_path: Path) -> None:
    runs = [made_up("plain", 0, 1.0), made_up("slow", 0, 2.0), made_up("fast", 0, 0.5)]
    rows = rows_of(runs, [])
    assert fastest(rows) == {("e", "w"): "fast"}
    draw(rows, "title", str(tmp_path / "peers.png"))
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_engines() -> None:
    found = table(PeersOptions(draft_model="d", quantization=("int8", "int4")))
    names = [engine.name for engine in found]
    assert names == ["pilotfish", "openvino", "llama.cpp", "transformers", "vllm"]
    for one in found:
        assert (WORKERS / one.script).is_file()
        assert one.requirements is None or (environments.REQUIREMENTS / one.requirements).is_file()
        assert all(process.engine == one.name for process in one.processes)
        keys = [(p.weights, v.name) for p in one.processes for v in p.variants]
        assert len(keys) == len(set(keys))
    ours = [(p.weights, [v.name for v in p.variants]) for p in found[0].processes]
    assert ours[:2] == [("int8", ["plain", "suffix auto"]), ("int8", ["draft_model auto"])]
    assert [engine.name for engine in table(PeersOptions(engines=("vllm",)))] == ["vllm"]
    with pytest.raises(OptionError, match="did you mean 'openvino'"):
        table(PeersOptions(engines=("openvno",)))
    assert engines_module.PLAIN == "plain"


def test_pins_are_exact() -> None:
    for path in environments.REQUIREMENTS.glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all("==" in line and "+" not in line for line in lines), path.name


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def pretend(command: list[str], **_options: Any) -> Any:
        calls.append(command)
        python = tmp_path / "peer" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        return subprocess.CompletedProcess(command, 1 if "--fail" in command else 0)

    monkeypatch.setattr(environments.subprocess, "run", pretend)
    said: list[str] = []
    python = environments.interpreter(tmp_path / "peer", "llama_cpp.txt", {}, "--flag 'a b'", said.append)
    assert [command[1:3] for command in calls] == [["-m", "venv"], ["-m", "pip"]]
    assert calls[1][-4:-2] == ["--flag", "a b"]
    assert environments.interpreter(tmp_path / "peer", "llama_cpp.txt", {}, "", said.append) == python
    assert len(calls) == 2
    environments.interpreter(tmp_path / "peer", "vllm.txt", {}, "", said.append)  # other pins
    assert len(calls) == 4
    with pytest.raises(environments.InstallError, match="could not be installed"):
        environments.interpreter(tmp_path / "peer", "openvino.txt", {}, "--fail", said.append)


def test_facts_of_a_model_folder(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert num_weights(tmp_path) == 17
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert stop_ids(tmp_path) == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 1}, "max_tokens must be a whole number, 2 or more"),
        ({"quantization": ("int7",)}, "int8, int4, gguf or none, not 'int7'"),
        ({"timeout": 0.0}, "timeout must be more than 0"),
        ({"out": "runs.jsonl"}, "must not end in .jsonl"),
        ({"out": "no/such/folder/peers.json"}, "there is no folder"),
        ({"speculative_config": ("{",)}, "is not JSON"),
        ({"speculative_config": ('{"method": "ngrm"}',)}, "did you mean 'ngram'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PeersOptions(**options)


def test_the_command_line(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(main, ["--help"]).exit_code == 0
    result = runner.invoke(main, ["--engine", "openvno"])
    assert result.exit_code == 2
    assert "did you mean 'openvino'" in result.output
    result = runner.invoke(main, ["--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "it has no config.json" in result.output


def test_a_document_is_json(tmp_path: Path) -> None:
    outcome = run(tmp_path, engine("one", ("unloadable", (PLAIN,))))
    found = document(task(tmp_path), outcome, [])
    json.dumps(found, allow_nan=False)
    assert found["failures"][0]["what"] == "one unloadable plain"
    assert SERVE.is_file()
    assert "nothing was measured" in shown(tmp_path, outcome)
