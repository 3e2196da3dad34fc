"""A model that is asked once: logits remembered by token path, so that thousands of draws cost a few passes.

It does not know what the draws are for. The one trick: in the cache that the engine fills, a row's key is not a
vector but the *name* of the path that ends there (a node of a trie), so prefix sharing, rollback, kept tree paths and
preemption move names as they would move keys, and a pass only has to read the name in front of its rows.

    trie   ROOT ── "The" ── " cat" ── " sat"        the engine's cache   slot 7: name of "The cat"
                        └── " dog"                                       slot 8: name of "The cat sat"

Rows of a path not met before come from the real model, on a real cache of its own with pages of one token: whatever
of the path has been computed for another one is found there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.base import CausalLM, ModelOutput
from ..paged.batch import Batch, Feed, Span, lay_out
from ..paged.cache import KVCache, LayerShape

ROOT = 0
_ROWS_A_PASS = 256
_NAMES = (LayerShape(1, 1, 1),)


class MemoLM:
    """A `CausalLM` with the same laws as ``model``. num_rows: rows kept for prefixes; num_passes: real ones so far."""

    def __init__(self, model: CausalLM, num_rows: int = 4096):
        self.model, self.info = model, model.info
        self.num_passes = 0
        self._rows = model.new_cache(num_rows, 1)
        self._rows.prefix_sharing = True
        self._ids: dict[tuple[int, int], int] = {}  # (parent, token) -> name
        self._parents = [ROOT]
        self._tokens = [-1]
        self._logits: dict[int, Tensor] = {}
        self._taps: dict[tuple[int, int], Tensor] = {}  # (layer, name) -> [hidden]

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(_NAMES, num_pages, page_size, dtype=torch.int64, device=self.info.device)

    def forward(self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = ()) -> ModelOutput:
        names = [name for span in batch.spans for name in self._name_rows(span, cache)]
        wanted = [names[row] for row in batch.wanted_N.tolist()]
        missing = {name for name in wanted if name not in self._logits}
        if taps:
            missing |= {name for name in names if any((layer, name) not in self._taps for layer in taps)}
        self._compute(missing, taps)
        logits_NV = torch.stack([self._logits[name] for name in wanted]) if wanted else self._no_logits()
        return ModelOutput(logits_NV, {k: torch.stack([self._taps[k, name] for name in names]) for k in taps})

    def logits(self, path: Sequence[int]) -> Tensor:
        """[V], after this path."""
        name = ROOT
        for token in path:
            name = self._child(name, token)
        if name not in self._logits:
            self._compute({name}, ())
        return self._logits[name]

    def read(self, path: Sequence[int], num_wanted: int) -> None:
        """Remember the logits after the last ``num_wanted`` tokens of a path, in one pass."""
        names = [ROOT]
        for token in path:
            names.append(self._child(names[-1], token))
        self._compute({name for name in names[-num_wanted:] if name not in self._logits}, ())

    def _name_rows(self, span: Span, cache: KVCache) -> list[int]:
        """The names of a span's rows, which are written to their slots as a model would write keys."""
        feed = span.feed
        slots = span.key_slots
        written: list[int] = cache.keys[0][slots].flatten().tolist()
        trunk_end = feed.past + feed.num_trunk
        first = trunk_end + feed.skipped if feed.skipped else feed.past
        for i, token in enumerate(feed.tokens):
            place = first + i
            before = place - 1
            if place >= trunk_end:  # a node: its parent is the latest node it sees, or the trunk's end
                others = feed.ancestors[i - feed.num_trunk] & ~(1 << (place - trunk_end))
                before = trunk_end + others.bit_length() - 1
            written[place] = self._child(written[before] if before >= 0 else ROOT, token)
        cache.keys[0][slots] = torch.tensor(written, device=self.info.device).view(-1, 1, 1)
        return written[first:]

    def _child(self, parent: int, token: int) -> int:
        name = self._ids.setdefault((parent, token), len(self._tokens))
        if name == len(self._tokens):
            self._parents.append(parent)
            self._tokens.append(token)
        return name

    def _path(self, name: int) -> list[int]:
        """The names from the root's child down to this one."""
        path = []
        while name != ROOT:
            path.append(name)
            name = self._parents[name]
        return path[::-1]

    def _compute(self, missing: set[int], taps: Sequence[int]) -> None:
        """Fill in what is missing, longest paths first: they cover the missing rows above them."""
        paths = sorted(map(self._path, missing), key=len, reverse=True)
        feeds: list[tuple[Feed, list[int]]] = []
        covered: set[int] = set()
        num_rows = 0
        for number, path in enumerate(paths):
            if path[-1] in covered:
                continue
            sequence, tokens = str(number), [self._tokens[name] for name in path]
            past = self._rows.open(sequence, tokens)
            if not self._rows.reserve(sequence, len(path) - past):
                self._rows.release(sequence)
                self._run(feeds, taps)
                feeds, num_rows = [], 0
                past = self._rows.open(sequence, tokens)
                assert self._rows.reserve(sequence, len(path) - past), "the memo holds less than one text"
            first = next(i for i in range(past, len(path)) if path[i] in missing)
            feeds.append((Feed(sequence, tokens[past:], past, len(path) - first), path[past:]))
            covered.update(path[past:])
            num_rows += len(path) - past
            if num_rows >= _ROWS_A_PASS:
                self._run(feeds, taps)
                feeds, num_rows = [], 0
        self._run(feeds, taps)

    def _run(self, feeds: list[tuple[Feed, list[int]]], taps: Sequence[int]) -> None:
        """One real pass. Its rows stay findable for later paths; the sequences do not stay open."""
        if not feeds:
            return
        self.num_passes += 1
        batch = lay_out([feed for feed, _ in feeds], self._rows, self.info.device)
        output = self.model.forward(batch, self._rows, taps=taps)
        names = [name for _, path in feeds for name in path]
        for row, logits_V in zip(batch.wanted_N.tolist(), output.logits_NV, strict=True):
            self._logits.setdefault(names[row], logits_V.clone())
        for layer in taps:
            for name, state in zip(names, output.taps[layer], strict=True):
                self._taps.setdefault((layer, name), state.clone())
        for feed, path in feeds:
            tokens = [self._tokens[name] for name in self._path(path[-1])]
            self._rows.commit(feed.sequence, range(len(path)), tokens)
            self._rows.release(feed.sequence)

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.info.vocab_size, device=self.info.device)
