"""KVCache: keys and values of many sequences in one pool of pages. Target and draft models use the same class.

It does not know attention, sampling or requests; a sequence is an id with a length. The one trick: rolling back is
not keeping. A pass writes rows behind a sequence's length; `commit` says which of them stay; the next pass
overwrites the rest.

    one sequence:   [ shared full pages | own full pages | own last page ]
                    0 ........................... length ^ scratch rows of the running pass ...

Only committed rows of full pages are ever made known for sharing, and such rows are never written again.

Of an encoder-decoder model these are the decoder's rows. A sequence then has a source; what the model made of it (the
keys and values of cross-attention) is kept here as well, shared by the sequences with this source, and goes with the
last of them. Of a model with adapters, a sequence may have one of them, by name. What rows are depends on both, so it
is shared under the same source and adapter only: their common name is the sequence's origin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from ..decoding.source import Features, Source
from .pages import ROOT, Origin, PagePool, Parent

Reading = TypeVar("Reading")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values: heads and widths."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True)
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    num_known: int = 0  # full pages that the pool has been told of
    last_known: Parent = ROOT  # the number of the last of them
    source: Source = ()
    adapter: str = ""

    @property
    def origin(self) -> Origin:
        # Pages outlive their sequences, so they must not hold on to numbers.
        name = (self.source.digest,) if isinstance(self.source, Features) else self.source
        return (self.adapter, *name) if self.adapter else name


class KVCache:
    """keys[layer], values[layer]: [num_pages * page_size, heads, dim] each; a row's place is called its slot."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_sharing: bool = True,
    ):
        self.layers, self.page_size, self.prefix_sharing = tuple(layers), page_size, prefix_sharing
        self.pool = PagePool(num_pages, page_size)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._stacks: list[Tensor] = []  # [layers, slots, heads, dim]: what `commit` moves in one go
        self._sequences: dict[str, _Sequence] = {}
        self._readings: dict[Origin, object] = {}
        num_slots = num_pages * page_size
        for shape, group in groupby(self.layers):
            count = len(list(group))
            # Not zeroed: unwritten slots are never read, and untouched memory costs nothing.
            k_LSHD = torch.empty(count, num_slots, shape.num_heads, shape.key_dim, dtype=dtype, device=device)
            v_LSHD = torch.empty(count, num_slots, shape.num_heads, shape.value_dim, dtype=dtype, device=device)
            self.keys.extend(k_LSHD)
            self.values.extend(v_LSHD)
            self._stacks += [k_LSHD, v_LSHD]

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._sequences

    @property
    def sequences(self) -> tuple[str, ...]:
        """Ids of the open sequences."""
        return tuple(self._sequences)

    @property
    def bytes_per_token(self) -> int:
        size = self.keys[0].element_size() if self.keys else 0
        return sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in self.layers) * size

    @property
    def capacity(self) -> int:
        """Rows the whole pool holds."""
        return self.pool.num_pages * self.page_size

    def length(self, sequence: str) -> int:
        """Committed rows."""
        return self._sequences[sequence].length

    def source(self, sequence: str) -> Source:
        """What the encoder reads for this sequence; empty for a decoder-only model's."""
        return self._sequences[sequence].source

    def adapter(self, sequence: str) -> str:
        """The adapter that makes this sequence's rows; "" for the model alone."""
        return self._sequences[sequence].adapter

    def was_read(self, sequence: str) -> bool:
        """Whether a sequence's source, if it has one, was read already."""
        entry = self._sequences[sequence]
        return not entry.source or entry.origin in self._readings

    def reading(self, sequence: str, read: Callable[[Source], Reading]) -> Reading:
        """What a model makes of a sequence's source, made at the first call."""
        entry = self._sequences[sequence]
        assert entry.source, f"{sequence} has no source"
        if entry.origin not in self._readings:
            self._readings[entry.origin] = read(entry.source)
        return self._readings[entry.origin]  # type: ignore[return-value]  # one model, one kind of reading

    def open(self, sequence: str, tokens: Sequence[int], source: Source | Sequence[int] = (), adapter: str = "") -> int:
        """Begin a sequence; returns how many of its first rows are there already, from pages with the same tokens
        (and the same source and adapter).

        At least the last token is always left to compute: its logits are wanted.
        """
        assert sequence not in self._sequences, f"{sequence} is open already"
        source = source if isinstance(source, Features) else tuple(source)
        entry = self._sequences[sequence] = _Sequence(source=source, adapter=adapter)
        entry.last_known = entry.origin or ROOT
        if self.prefix_sharing:
            for start in range(0, len(tokens) - self.page_size, self.page_size):
                hit = self.pool.find(entry.last_known, tokens[start : start + self.page_size])
                if hit is None:
                    break
                page, entry.last_known = hit
                self.pool.share(page)
                entry.pages.append(page)
            entry.num_known = len(entry.pages)
            entry.length = entry.num_known * self.page_size
        return entry.length

    def shortfall(self, sequence: str, num_rows: int) -> int:
        """Pages that `reserve` would have to take for this many rows behind the length."""
        entry = self._sequences[sequence]
        return max(0, -(-(entry.length + num_rows) // self.page_size) - len(entry.pages))

    def reserve(self, sequence: str, num_rows: int) -> bool:
        """Make room for rows behind the length; False (and nothing taken) if the pool is short of pages."""
        missing = self.shortfall(sequence, num_rows)
        if missing > self.pool.num_free:
            return False
        pages = self._sequences[sequence].pages
        for _ in range(missing):
            page = self.pool.allocate(after=pages[-1] if pages else None)
            assert page is not None
            pages.append(page)
        return True

    def commit(self, sequence: str, kept: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep these rows of the last pass and forget the others.

        kept: offsets behind the length, ascending. tokens: the sequence's ids, at least up to the new length.
        """
        entry = self._sequences[sequence]
        if len(kept) and kept[-1] != len(kept) - 1:
            self._move(entry, kept)
        entry.length += len(kept)
        assert entry.length <= len(tokens), (entry.length, len(tokens))
        if self.prefix_sharing:
            while (end := (entry.num_known + 1) * self.page_size) <= entry.length:
                page, chunk = entry.pages[entry.num_known], tokens[end - self.page_size : end]
                entry.last_known = self.pool.remember(page, entry.last_known, chunk)
                entry.num_known += 1

    def release(self, sequence: str) -> None:
        """Let go of a sequence and its pages; unknown ids are fine (released twice is released)."""
        entry = self._sequences.pop(sequence, None)
        for page in reversed(entry.pages if entry else []):
            self.pool.release(page)
        if entry and entry.source and all(other.origin != entry.origin for other in self._sequences.values()):
            self._readings.pop(entry.origin, None)

    def slots(self, sequence: str, start: int, stop: int) -> range | list[int]:
        """Slots of rows start..stop-1; a range if they lie side by side (then they can be read as a view)."""
        size, pages = self.page_size, self._sequences[sequence].pages
        first, last = start // size, (stop - 1) // size
        if stop <= start:
            return range(0)
        if all(pages[i + 1] == pages[i] + 1 for i in range(first, last)):
            begin = pages[first] * size + start % size
            return range(begin, begin + stop - start)
        return [pages[i // size] * size + i % size for i in range(start, stop)]

    def check(self) -> None:
        """Integrity of pages, counts and lengths. Cheap enough for tests to call after every step."""
        self.pool.check([entry.pages for entry in self._sequences.values()])
        for name, entry in self._sequences.items():
            assert entry.length <= len(entry.pages) * self.page_size, f"{name}: more rows than pages"
            assert entry.num_known * self.page_size <= entry.length, f"{name}: a row made known before it was committed"
        assert set(self._readings) <= {entry.origin for entry in self._sequences.values()}, (
            "a reading that nobody needs"
        )

    def _move(self, entry: _Sequence, kept: Sequence[int]) -> None:
        """Bring a kept tree path to its place. Keys were rotated for their true positions, so they stay valid."""
        size, pages = self.page_size, entry.pages
        # Rows before the first gap lie right already.
        moved = [(offset, place) for place, offset in enumerate(kept) if offset != place]
        slots = [[pages[(entry.length + i) // size] * size + (entry.length + i) % size for i in column]
                 for column in zip(*moved, strict=True)]  # fmt: skip
        source, target = torch.tensor(slots, device=self._stacks[0].device)
        for stack in self._stacks:
            stack[:, target] = stack[:, source]
