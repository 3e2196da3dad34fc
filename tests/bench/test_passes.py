"""Passes beside their floor: every kind is timed, and options and models that cannot be are told in one line."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pilotfish.bench import passes
from pilotfish.errors import OptionError
from pilotfish.models.load import load
from pilotfish.models.quantized import QuantizedDecoder
from pilotfish.native.build import BuildError, plan

from ..models.test_load import tokenizer
from ..models.test_quantized import SHAPE
from ..models.tiny import tiny_model


def test_every_kind_is_timed_and_the_table_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        plan("plain")
    except BuildError:
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(passes, "_READ_BYTES", 1 << 16)
    folder = str(tmp_path / "model")
    tiny_model("qwen2", dtype=torch.float32, **SHAPE, tie_word_embeddings=False).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    found = passes.measure(passes.PassOptions(model=folder, context=20, turns=2))
    assert set(found.seconds) == {(kernels, rows) for kernels in passes.KERNELS for rows in passes.NUM_ROWS}
    assert all(seconds > 0 for seconds in (*found.seconds.values(), found.floor)) and found.num_bytes > 10_000
    model = load(folder, quantization="int8").model
    assert isinstance(model, QuantizedDecoder)
    looked_up = sum(model.quantised.arrays[f"embedding.{part}"].nbytes for part in ("weights", "scales", "bias"))
    assert found.num_bytes == model.quantised.num_bytes - looked_up
    result = CliRunner().invoke(passes.main, ["--model", folder, "--context", "20", "--turns", "1"])
    assert result.exit_code == 0 and "native" in result.output and "numba" in result.output
    result = CliRunner().invoke(passes.main, ["--model", folder, "--context", "100000"])
    assert result.exit_code == 2 and "context 100000 is too long" in result.output


def test_bad_options_are_named() -> None:
    with pytest.raises(OptionError, match="turns must be a whole number"):
        passes.PassOptions(turns=0)


def test_a_model_that_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    result = CliRunner().invoke(passes.main, ["--model", folder])
    assert result.exit_code != 0 and f"{folder} cannot be quantised" in result.output
