"""`pilotfish train` from beginning to end, on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pilotfish.cli import main
from pilotfish.errors import OptionError
from pilotfish.heads.store import load_head
from pilotfish.models.load import load
from pilotfish.train.loop import precision
from pilotfish.train.options import Eagle3Options, MedusaOptions, TrainOptions
from pilotfish.train.run import loading
from tests.train.tiny import folder_model

COMMON = ("--num-tokens", "600", "--max-length", "128", "--draft-vocab-size", "128", "--batch-tokens", "256",
          "--holdout", "0.2", "--quantization", "none", "--bench-limit", "1", "--epochs", "1")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_model(tmp_path_factory.mktemp("tiny"))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["train", *words], catch_exceptions=False)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_one_command_ends_with_a_head_and_what_it_is_worth(model: str, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    result = run(kind, "-m", model, "--out", str(out), *COMMON)
    assert result.exit_code == 0, result.stderr
    assert "collected" in result.stderr and f"--method {kind} --draft-model {out / 'head'}" in result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    row, auto = [row for row in rows if row["method"] == kind and row["category"] == "all"]
    assert row["identical"] and row["speedup"] is not None and len(row["acceptance_by_position"]) > 0
    assert auto["num_speculative_tokens"] == "auto" and auto["identical"]
    load_head(out / "head", load(model))
    entries = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
    assert {entry["split"] for entry in entries} == {"train", "held_out"}
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    before = (out / "head" / "model.safetensors").read_bytes()

    again = run(kind, "-m", model, "--out", str(out), *COMMON)
    assert again.exit_code == 0
    assert "going on at step" in again.stderr and "collected" not in again.stderr
    assert (out / "head" / "model.safetensors").read_bytes() == before

    other = run(kind, "-m", model, "--out", str(out), *COMMON, "--learning-rate", "0.5")
    assert other.exit_code == 2
    assert "learning_rate" in other.stderr and "another folder" in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --out"),
        (["--out", "x", "--loss", "mse"], "'mse' is not one of"),
        (["--out", "x", "--num-tokens", "0"], "num_tokens must be a whole number, 1 or more, not 0"),
        (["--out", "x", "--holdout", "1"], "holdout must be a number 0 or more and below 1, not 1.0"),
        (["--out", "x", "--learning-rate", "0"], "learning_rate must be a number above 0, not 0.0"),
        (["--out", "x", "--taps", "1"], "taps must be three layers, not (1,)"),
        (["--out", "x", "--seed-text", "/nowhere"], "there is no folder /nowhere"),
        (["--out", "/proc/none"], "out: /proc/none cannot be made"),
    ],
)
def test_a_mistake_is_one_line(
    model: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("eagle3", "-m", model, "--quantization", "none", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_every_option_is_a_flag_but_those_that_decide_the_head_are_remembered() -> None:
    options = Eagle3Options(out="x")
    assert {"loss", "unroll", "decay", "taps", "seed"} <= set(options.identity())
    assert not {"out", "bench_limit", "num_tokens", "state_cache"} & set(options.identity())
    assert "num_heads" in MedusaOptions(out="x").identity()
    with pytest.raises(OptionError, match="precision must be"):
        TrainOptions(out="x", precision="int8")  # type: ignore[arg-type]


def test_the_target_is_int8_where_that_is_fast() -> None:
    assert loading({"device": "cpu"}).quantization == "int8"
    assert loading({"device": "cpu", "quantization": "none"}).quantization == "none"
    assert loading({"device": "cpu", "dtype": "bfloat16"}).quantization == "none"
    assert loading({"device": "cpu", "model_impl": "hf"}).quantization == "none"


def test_precision_can_be_chosen() -> None:
    assert precision("float32", torch.device("cpu")) == torch.float32
    assert precision("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert precision("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)
