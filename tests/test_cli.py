"""The command line as people meet it: what it prints, what it refuses, and how it ends."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pilotfish.bench import measure
from pilotfish.cli import main
from pilotfish.drafters import registry
from pilotfish.engine.engine import Engine
from tests.models.tiny import tiny_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model folder with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    tiny_model("llama", vocab_size=256, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


def test_generate_prints_the_text_and_a_line_about_it(model: str) -> None:
    result = run("generate", "abcabcabc", "-m", model, "--max-tokens", "12", "--method", "ngram")
    assert result.exit_code == 0
    assert "lossless" in result.stderr
    assert "K auto (8 rows cost " in result.stderr and "predicted gain" in result.stderr
    assert "12 tokens" in result.stderr
    assert "finish reason: length" in result.stderr
    assert "nothing drafts" not in result.stderr
    plain = run("generate", "abcabcabc", "-m", model, "--max-tokens", "12")
    assert result.stdout == plain.stdout
    assert "nothing drafts: give --method" in plain.stderr


def test_generate_json_has_text_ids_usage_and_the_block(model: str) -> None:
    result = run("generate", "abc", "-m", model, "--max-tokens", "8", "--json", "--logprobs", "2", "--method", "ngram")
    (line,) = result.stdout.splitlines()
    answer = json.loads(line)
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 8
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8}
    assert "mean_acceptance_length" in answer["speculative_decoding"]


def test_several_completions_are_several_lines(model: str) -> None:
    result = run("generate", "abc", "-m", model, "--max-tokens", "4", "--n", "3", "--seed", "1", "--temperature", "1")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert len({tuple(line["token_ids"]) for line in lines}) > 1


def test_a_prompt_comes_from_a_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("abcabcabc")
    common = ("-m", model, "--max-tokens", "6")
    assert run("generate", "-f", str(path), *common).stdout == run("generate", "abcabcabc", *common).stdout


def test_the_config_is_the_canonical_form_of_the_flags(model: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"method": "ngram", "num_speculative_tokens": 3}))
    short = run("generate", "abcabc", "-m", model, "--method", "ngram", "--num-speculative-tokens", "3")
    long = run("generate", "abcabc", "-m", model, "--speculative-config", f"@{path}")
    inline = run("generate", "abcabc", "-m", model, "--speculative-config", path.read_text())
    assert short.stderr.splitlines()[0] == long.stderr.splitlines()[0] == inline.stderr.splitlines()[0]


def test_a_draft_model_drafts(model: str) -> None:
    words = ("generate", "abc", "-m", model, "--draft-model", model, "--max-tokens", "9", "--json")
    answer = json.loads(run(*words).stdout)
    assert answer["speculative_decoding"]["draft_acceptance_rate"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature must be 0 (greedy) or more, not -1.0"),
        (["--top-p", "0"], "top_p must be in (0, 1], not 0.0"),
        (["--temperature", "nan"], "temperature must be a finite number"),
        (["--max-tokens", "0"], "max_tokens must be 1 or more, not 0"),
        (["--stop", ""], "stop must be non-empty strings"),
        (["--method", "ngarm"], "unknown method 'ngarm'; did you mean 'ngram'?"),
        (["--method", "ngram", "--num-speculative-tokens", "-1"], "from 0 to 63 or auto, not -1"),
        (["--method", "ngram", "--num-speculative-tokens", "64"], "from 0 to 63 or auto, not 64"),
        (["--method", "ngram", "--prompt-lookup-min", "0"], "prompt_lookup_min must be a whole number from 1, not 0"),
        (["--method", "draft_model"], "needs a draft model"),
        (["--method", "draft_model", "--draft-model", "./nowhere"], "there is no folder nowhere"),
        (["--num-pages", "1"], "raise num_pages"),
        (["--num-pages", str(10**15)], "lower num_pages"),
        (["--max-model-len", "4"], "the prompt has 6 tokens and the context 4"),
        (["--exit-layer", "1"], "needs a method: one of layer_skip (on the command line --method)"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", '{"method": "ngram", "prompt_lookup_mx": 3}'], "did you mean 'prompt_lookup_max'?"),
        (["--speculative-config", '{"method": "ngram"}', "--method", "none"], "method is given twice"),
        (["--dtype", "float23"], "dtype must be auto"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_value(model: str, words: list[str], message: str) -> None:
    result = run("generate", "abcabc", "-m", model, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize("flag", ["--methud", "--num-speculative-token", "--draft-modle"])
def test_an_unknown_flag_names_the_nearest(flag: str) -> None:
    result = run("generate", "abc", flag, "x")
    assert result.exit_code == 2
    assert "Did you mean" in result.stderr


def test_an_empty_prompt_is_refused(model: str) -> None:
    assert "the prompt is empty" in run("generate", "", "-m", model).stderr
    assert run("generate", "-m", model).exit_code == 2


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all"])
def test_a_missing_model_is_named(name: str) -> None:
    result = run("generate", "abc", "-m", name)
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_an_interrupt_shows_what_there_is_and_why_it_ends(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Iterator[int] = iter(range(4))
    step, engines = Engine.step, []

    def interrupted(engine: Engine) -> Any:
        engines.append(engine)
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("generate", "abc", "-m", model, "--max-tokens", "50")
    assert result.exit_code == 130
    assert "3 tokens" in result.stderr
    assert "finish reason: abort" in result.stderr
    assert len(result.stdout.strip("\n")) > 0
    assert engines[0].cache.pool.num_held == 0


def test_an_interrupt_while_the_model_is_loaded_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pilotfish.llm.load", interrupted)
    result = run("generate", "abc")
    assert (result.exit_code, result.output) == (130, "")


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment where importing torch is like pressing Ctrl-C."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["bench", "--help"], 0),
        (["generate", "abc", "--methud", "ngram"], 2),
        (["genrate"], 2),
        (["generate", "abc"], 130),  # the negative control: this one needs torch
    ],
)
def test_torch_is_not_imported_for_help_and_an_interrupt_of_imports_is_no_error(
    words: list[str], status: int, without_torch: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "pilotfish", *words]
    done = subprocess.run(command, env=without_torch, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (status == 0)


def test_an_interrupt_of_json_gives_what_there_is(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Iterator[int] = iter(range(4))
    step = Engine.step

    def interrupted(engine: Engine) -> Any:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("generate", "abc", "-m", model, "--json", "--n", "2", "--seed", "1", "--max-tokens", "50")
    assert result.exit_code == 130
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(len(answer["token_ids"]), answer["finish_reason"]) for answer in answers] == [(3, "abort")] * 2


def test_a_text_of_a_given_form(model: str) -> None:
    words = ["generate", "abc", "-m", model, "--max-tokens", "8", "--json"]
    for flag, fits in (
        (["--guided-choice", "fish", "--guided-choice", "shark"], {"fish", "shark"}),
        (["--guided-regex", "a{3}"], {"aaa"}),
        (["--guided-json", '{"enum": [12]}'], {"12"}),
        (["--guided-grammar", 'start: "x" "y"'], {"xy"}),
    ):
        answer = json.loads(run(*words, *flag).stdout)
        assert answer["text"] in fits and answer["finish_reason"] == "stop"
    result = run(*words, "--guided-regex", "a", "--guided-json-object")
    assert result.exit_code == 2 and "not json_object and regex" in result.stderr


def test_chat_remembers_what_was_said(model: str) -> None:
    words = ["chat", "-m", model, "--max-tokens", "4"]
    result = CliRunner().invoke(main, words, input="abc\nabc\n\n", catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr.count("[4 tokens") == 2
    assert "Ctrl-D" not in result.stderr, "nobody types here"
    first, second = result.stdout.splitlines()[:2]
    assert first != second  # the second answer has more before it


def test_chat_says_how_to_leave_it_to_whoever_types(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pilotfish.cli.texts.sys", types.SimpleNamespace(stdin=types.SimpleNamespace(isatty=lambda: True))
    )
    result = CliRunner().invoke(main, ["chat", "-m", model], input="\n", catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1] == "an empty line or Ctrl-D ends the talk, Ctrl-C cuts an answer short"


def test_inspect_says_what_drafts_and_why_not(model: str) -> None:
    facts = json.loads(run("inspect", model, "--json").stdout)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["kv_bytes_per_token"] == 3 * 2 * (8 + 8) * 4
    assert set(facts["drafters"]) == set(registry.methods())
    assert facts["drafters"]["ngram"] is None
    assert "needs a draft model" in facts["drafters"]["draft_model"]
    assert json.loads(run("inspect", model, "--json", "--draft-model", model).stdout)["drafters"]["draft_model"] is None
    assert "what can draft for it" in run("inspect", model).stdout


def test_inspect_shows_what_is_known_before_it_measures(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_words: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pilotfish.cli.measuring._quality", interrupted)
    result = run("inspect", model)
    assert result.exit_code == 130
    assert "what can draft for it" in result.stdout
    refused = run("inspect", "nowhere", "--limit", "3")
    assert refused.exit_code == 2 and "give that too" in refused.stderr


def test_bench_ends_with_a_json_document(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abcabcabc", "category": "letters"}\n')
    words = ("bench", "-m", model, "--prompts", str(path), "--repeats", "1", "--max-tokens", "8", "--method", "ngram")
    result = run(*words, "--num-speculative-tokens", "3")
    assert result.exit_code == 0
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {(row["method"], row["category"]) for row in rows} >= {("none", "all"), ("ngram", "letters")}
    assert all(row["identical"] for row in rows)


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize("num_runs", [0, 3])
def test_an_interrupted_measurement_shows_what_there_is_and_is_no_success(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, num_runs: int
) -> None:
    run_one, left, out = measure._run, [num_runs], tmp_path / "best.json"

    def until(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run_one(*arguments)

    monkeypatch.setattr(measure, "_run", until)
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabcabc"}\n')
    words = [command, "-m", model, "--prompts", str(tmp_path / "p.jsonl"), "--max-tokens", "8", "--method", "ngram"]
    result = run(*words, *(["--out", str(out)] if command == "tune" else []), "--num-speculative-tokens", "2")
    assert result.exit_code == 130
    assert "interrupted" in result.stdout
    assert ("ngram" in result.stdout) == (num_runs > 0)
    assert not out.exists()


def test_bench_json_is_one_document(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abcabcabc"}\n')
    words = ("bench", "-m", model, "--prompts", str(path), "--repeats", "1", "--max-tokens", "4", "--json")
    assert json.loads(run(*words).stdout).keys() == {"rows", "environment"}
    refused = run(*words, "--profile")
    assert refused.exit_code == 2 and "leave one out" in refused.stderr


def test_tune_layer_skip_searches_layers_and_takes_none(model: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "best.json"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3, 4]}) + "\n")
    common = ["-m", model, "--prompts", str(prompts), "--max-tokens", "4", "--repeats", "1", "--out", str(out)]
    done = run("tune", "layer_skip", *common, "--num-speculative-tokens", "2")
    assert done.exit_code == 0 and "predicted" in done.output
    assert json.loads((tmp_path / "best.layers.json").read_text())["method"] == "layer_skip"
    refused = run("tune", "layer_skip", *common, "--skip-layers", "1")
    assert refused.exit_code == 2 and "searches the layers" in refused.output


def test_bench_refuses_an_option_that_no_method_has(model: str) -> None:
    result = run("bench", "-m", model, "--method", "ngram", "--draft-model", model)
    assert result.exit_code == 2
    assert "unknown option for ngram: 'model'" in result.stderr


def test_every_option_of_every_method_is_a_flag() -> None:
    command = main.commands["generate"]
    assert isinstance(command, click.Command)
    names = {parameter.name for parameter in command.params}
    assert set(registry.keywords()) <= names


def test_no_flag_is_given_twice() -> None:
    for command in main.commands.values():
        names = [name for parameter in command.params for name in parameter.opts]
        assert len(names) == len(set(names)), command.name
