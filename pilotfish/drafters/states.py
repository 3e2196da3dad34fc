"""Hidden states of the target as they come: which rows of a pass belong to which places of which text.

It does not know heads. The one trick: a row that stayed in the target's cache is that place's state for good, so states
are only ever appended; places that were not computed (a prefix found in the cache) are a gap, told by its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..decoding.request import Request, Step
    from ..paged.cache import KVCache


def kept_rows(steps: Sequence[Step], cache: KVCache) -> Iterator[tuple[Request, int, list[int]]]:
    """For each request that goes on: the place of its first row, and the rows of the batch that stayed, in order.

    cache: the target's, after its commit; the rows of a step are the last it got.
    """
    start = 0
    for step in steps:
        if step.finish is None:
            past = cache.length(step.request.id) - len(step.kept)
            yield step.request, past, [start + offset for offset in step.kept]
        start += step.num_rows
