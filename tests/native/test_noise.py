"""Exponentials from the library: numpy's, number for number, or none at all."""

from decimal import Decimal

import numpy as np
import pytest

from pilotfish.decoding import noise
from pilotfish.models.kernels import library
from pilotfish.native.library import Library
from pilotfish.native.noise import exponentials_of

from .test_kernels import native  # noqa: F401  (a fixture)

KEYS = (0, 1, 5 + 2**64, 2**128 - 1, *(noise.fold(7, i) * noise.fold(8, i) for i in range(1, 30)))


def test_they_are_numpy_s(native: Library) -> None:  # noqa: F811
    draw = exponentials_of(native)
    assert draw is not None
    for key in KEYS:
        for num in (1, 3, 300, 20_000):
            assert np.array_equal(draw(key, num), noise.draw_exponentials(key, num)), (key, num)


@pytest.mark.parametrize("tail", ["7.69711747013104972", "7.6971", "8"])
def test_tables_that_are_not_numpy_s_are_not_used(tail: str, native: Library, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of the first only the last bits differ."""
    monkeypatch.setattr("pilotfish.native.noise._TAIL", Decimal(tail))
    assert exponentials_of(native) is None


def test_whoever_loads_the_library_draws_with_it(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    before = noise.exponentials(11, 12, 500)
    noise.exponentials.cache_clear()
    library(native.kind)
    asked = []
    fast = noise._draw[0]
    monkeypatch.setattr(noise, "_draw", [lambda key, num: (asked.append(num), fast(key, num))[1]])
    assert np.array_equal(noise.exponentials(11, 12, 500), before) and asked == [500]
