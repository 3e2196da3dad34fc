"""The measurement of products: every size is run, in turns, and takes its time."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pilotfish.bench import kernels
from pilotfish.models.kernels import library
from pilotfish.models.products import GROUPED
from pilotfish.native.build import BuildError, plan


@pytest.mark.parametrize("bits", [4, 8, GROUPED])
def test_each_number_of_rows_takes_its_turn(bits: int, monkeypatch: Any) -> None:
    try:
        plan("plain")
    except BuildError:
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(kernels, "_TOTAL_BYTES", 20_000)
    bits_a_weight = {4: 5, 8: 8, GROUPED: 8.5}[bits]
    product = kernels.Product(64, 96, bits)
    product.out[:] = float("nan")
    seconds = kernels.measure(library(), product, 2, turns=2)
    assert list(seconds) == [0, *kernels.NUM_ROWS] and all(0 < s < 5 for s in seconds.values())
    assert not (product.out != product.out).any()
    assert product.all_bytes == 64 * 96 * bits_a_weight // 8 + (256 if bits == 8 else 0)


def test_what_is_wrong_is_told_in_one_line(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(kernels.main, [])
    assert result.exit_code == 1 and "no C++ compiler" in result.output and result.output.count("\n") == 1
    assert CliRunner().invoke(kernels.main, ["--fast"]).exit_code == 2


def test_its_command_is_named_in_its_own_words() -> None:
    assert "python -m pilotfish.bench.kernels" in Path(kernels.__file__).read_text()
