"""Paths give back what they were joined from, and two texts never share one."""

import itertools

from pilotfish.decoding.paths import join, split


def test_a_path_is_taken_apart_again():
    parts = [(), (0,), (5, 0), (3, 3, 3)]
    paths = set()
    for source, tokens in itertools.product(parts, parts):
        path = join(source, tokens)
        assert split(path) == (source, tokens)
        paths.add(path)
    assert len(paths) == len(parts) ** 2


def test_without_a_source_a_path_is_the_text():
    assert join((), [1, 2]) == (1, 2)
    assert split([1, 2]) == ((), (1, 2))
