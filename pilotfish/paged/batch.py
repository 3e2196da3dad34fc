"""Batch: one pass's rows, as lists and as tensors. The only place where host lists become tensors, and only where
somebody asks for them: a compiled pass wants none.

It does not know what the rows are for. The one trick: there are no phases. A `Feed` is "rows behind what the cache
has", be that a prompt, a chunk of one, a pending token with a draft tree, or a draft model's catch-up; all of them
lie ragged, end to end, in one batch.

    one feed:   cache  [ 0 ........ past ) [ trunk: a chain ) [ nodes: a tree, each seeing past + trunk + ancestors )
    positions             past, past+1, ...                    past + num_trunk + depth
    slots                 past, past+1, ...                    past + num_trunk + skipped + 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..lazily import np, torch

if TYPE_CHECKING:
    from torch import Tensor

    from .cache import KVCache


@dataclass(frozen=True, slots=True)
class Feed:
    """One sequence's rows in a pass.

    tokens: ``num_trunk`` tokens that follow each other, then one per tree node.
    past: rows already in the cache that every row sees.
    ancestors: per node the 64-bit set of the nodes it sees, itself included, counting ``skipped`` nodes first that
        earlier passes wrote behind the trunk.
    num_wanted: logits are wanted for that many rows, counted from the end.
    """

    sequence: str
    tokens: Sequence[int]
    past: int
    num_wanted: int
    ancestors: tuple[int, ...] = ()
    skipped: int = 0

    @property
    def num_trunk(self) -> int:
        return len(self.tokens) - len(self.ancestors)

    @property
    def num_keys(self) -> int:
        """Rows in the cache after this feed: what its last row may see, if its ancestors allow."""
        return self.past + self.skipped + len(self.tokens)

    def positions(self) -> list[int]:
        base = self.past + self.num_trunk
        return [*range(self.past, base), *(base + bits.bit_count() - 1 for bits in self.ancestors)]


@dataclass
class Span:
    """Where one feed lies in the batch: rows start..stop-1, and the slots of its keys."""

    feed: Feed
    start: int
    stop: int
    slots: range | list[int]
    device: torch.device
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @cached_property
    def key_slots(self) -> slice | Tensor:
        return _index(self.slots, self.device)

    def mask(self, window: int | None) -> Tensor | None:
        """Bool [rows, keys], True where a row sees a key; None if every row sees every key. Built once per window."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def key_positions(self) -> Tensor:
        """[keys], the place of each key in the text. That of a node which no row of this pass sees means nothing."""
        keys, trunk_end = self.feed.num_keys, self.feed.past + self.feed.num_trunk
        if not self.feed.ancestors:
            return torch.arange(keys, device=self.device)
        return torch.cat([torch.arange(trunk_end), self._node_positions(trunk_end, keys)]).to(self.device)

    def _build_mask(self, window: int | None) -> Tensor | None:
        feed, rows, keys = self.feed, self.stop - self.start, self.feed.num_keys
        outside = window is not None and keys > window
        if rows == 1 and not outside and (not feed.ancestors or feed.ancestors[0].bit_count() == feed.skipped + 1):
            return None
        trunk_end = feed.past + feed.num_trunk
        key_positions = torch.arange(keys)
        row_positions = torch.tensor(feed.positions())
        seen = key_positions[None, :] <= row_positions[:, None]
        if feed.ancestors:
            nodes = torch.tensor([[bits >> i & 1 for i in range(keys - trunk_end)] for bits in feed.ancestors])
            seen[: feed.num_trunk, trunk_end:] = False
            seen[feed.num_trunk :, :trunk_end] = True
            seen[feed.num_trunk :, trunk_end:] = nodes.bool()
            key_positions = torch.cat([key_positions[:trunk_end], self._node_positions(trunk_end, keys)])
        if window is not None:
            seen &= row_positions[:, None] - key_positions[None, :] < window
        return seen.to(self.device)

    def _node_positions(self, trunk_end: int, keys: int) -> Tensor:
        """Positions of the node keys. A skipped node's depth is read off any row that sees it: its ancestors' count."""
        depths = [0] * (keys - trunk_end)
        for bits in self.feed.ancestors:
            for depth, node in enumerate(i for i in range(keys - trunk_end) if bits >> i & 1):
                depths[node] = depth
        return torch.tensor([trunk_end + depth for depth in depths])


@dataclass
class Batch:
    """A line per row: its token, its position, and the slot where its key and value go. wanted: rows with logits.

    tokens_T, positions_T, wanted_N: the same on the device, int64. slots_T: what indexes the slots."""

    spans: list[Span]
    tokens: list[int]
    positions: list[int]
    slots: range | list[int]
    wanted: list[int]
    device: torch.device

    @cached_property
    def tokens_T(self) -> Tensor:
        return _numbers(self.tokens, self.device)

    @cached_property
    def positions_T(self) -> Tensor:
        return _numbers(self.positions, self.device)

    @cached_property
    def slots_T(self) -> Tensor | slice:
        return _index(self.slots, self.device)

    @cached_property
    def wanted_N(self) -> Tensor:
        return _numbers(self.wanted, self.device)

    @property
    def num_rows(self) -> int:
        return self.spans[-1].stop

    def __len__(self) -> int:
        return len(self.spans)


def lay_out(feeds: Sequence[Feed], cache: KVCache, device: torch.device | str = "cpu") -> Batch:
    """Feeds end to end. Room for their rows must have been reserved."""
    assert feeds, "a pass over nothing"
    if not isinstance(device, torch.device):
        device = torch.device(device)
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    writes: list[range | list[int]] = []
    spans: list[Span] = []
    for feed in feeds:
        start = len(tokens)
        tokens += feed.tokens
        stop = len(tokens)
        positions += feed.positions()
        wanted += range(stop - feed.num_wanted, stop)
        if feed.skipped:
            trunk_end = feed.past + feed.num_trunk
            assert feed.num_trunk == 0, "earlier nodes lie right behind the trunk, so there can be no new trunk"
            writes.append(cache.slots(feed.sequence, trunk_end + feed.skipped, feed.num_keys))
        else:
            writes.append(cache.slots(feed.sequence, feed.past, feed.num_keys))
        spans.append(Span(feed, start, stop, cache.slots(feed.sequence, 0, feed.num_keys), device))
    flat = writes[0] if len(writes) == 1 else [slot for slots in writes for slot in slots]
    return Batch(spans, tokens, positions, flat, wanted, device)


def _numbers(values: list[int], device: torch.device) -> Tensor:
    if device.type == "cpu":  # torch reads a list an item at a time, and there is a batch in every pass
        return torch.from_numpy(np.array(values, np.int64))
    return torch.tensor(values, dtype=torch.int64, device=device)


def _index(slots: range | list[int], device: torch.device) -> slice | Tensor:
    return slice(slots.start, slots.stop) if isinstance(slots, range) else _numbers(slots, device)
