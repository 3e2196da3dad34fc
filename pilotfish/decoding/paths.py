"""A place in a text as one path of numbers: what an encoder read, then what stands in the decoder's text.

It does not know requests or models, and only sources of tokens have paths. The one trick: a source's tokens are written
as ~token, which is negative, so one flat, hashable tuple serves both kinds of model, and a decoder-only model's path is
its text.
"""

from collections.abc import Sequence

from .source import Features, Source


def join(source: Source | Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """The path of a text, or of its beginning."""
    assert not isinstance(source, Features), "a text that is written from features has no path"
    return (*(~token for token in source), *tokens)


def split(path: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source and tokens of a path."""
    start = next((place for place, token in enumerate(path) if token >= 0), len(path))
    return tuple(~token for token in path[:start]), tuple(path[start:])
