"""What a bench run refuses to be asked for."""

from typing import Any

import pytest

from pilotfish.bench.options import BenchOptions
from pilotfish.errors import OptionError


@pytest.mark.parametrize(
    ("text", "values"),
    [(None, ()), ("4", (4,)), ("2,4, 8", (2, 4, 8)), ("8,2,8", (8, 2)), ("0,63", (0, 63)), ("4,auto", (4, "auto"))],
)
def test_several_k_may_be_given(text: str | None, values: tuple[Any, ...]) -> None:
    assert BenchOptions(num_speculative_tokens=text).num_drafted == values


@pytest.mark.parametrize("text", ["", ",", "4,", "64", "-1", "many", "4;8", "2.5", "Auto"])
def test_what_is_no_k_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="num_speculative_tokens must be numbers from 0 to 63, or auto"):
        BenchOptions(num_speculative_tokens=text)


@pytest.mark.parametrize(
    ("name", "value"), [("repeats", 0), ("limit", 0), ("concurrency", -1), ("max_tokens", 1), ("repeats", True)]
)
def test_counts_must_be_counts(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name} must be"):
        BenchOptions(**{name: value})


def test_texts_are_compared_where_they_are_determined() -> None:
    assert BenchOptions().comparable
    assert BenchOptions(temperature=1.0, seed=0).comparable
    assert not BenchOptions(temperature=1.0).comparable
