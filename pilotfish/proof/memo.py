"""A model that is asked once: logits remembered by token path, so that thousands of draws cost a few passes.

It does not know what the draws are for. The one trick: in the cache that the engine fills, a row's key is not a
vector but the *name* of the path that ends there (a node of a trie), so prefix sharing, rollback, kept tree paths and
preemption move names as they would move keys, and a pass only has to read the name in front of its rows.

    trie   ROOT ── "The" ── " cat" ── " sat"        the engine's cache   slot 7: name of "The cat"
                        └── " dog"                                       slot 8: name of "The cat sat"

A path is as in `decoding.paths`: of an encoder-decoder it begins with the source, and so does the trie.

Rows of a path not met before come from the real model, on a real cache of its own with pages of one token: whatever
of the path has been computed for another one is found there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoding.paths import join, split
from ..models.base import CausalLM, Ends, ModelOutput
from ..paged.batch import Batch, Feed, Span, lay_out
from ..paged.cache import KVCache, LayerShape

ROOT = 0
_ROWS_A_PASS = 256
_NAMES = (LayerShape(1, 1, 1),)


class MemoLM:
    """A `CausalLM` with the same laws as ``model``. num_rows: rows of its real cache, at least those of the longest
    text; num_passes: real ones so far."""

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
        self._partial: dict[tuple[tuple[int, ...], int, int], Tensor] = {}  # (layers, rows before, name) -> logits

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(_NAMES, num_pages, page_size, dtype=torch.int64, device=self.info.device)

    def ends(self) -> Ends:
        return self.model.ends()

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        by_span = [self._name_rows(span, cache) for span in batch.spans]
        names = [name for own in by_span for name in own]
        if layers is not None:
            assert not taps, "states are not remembered of passes through some layers"
            return ModelOutput(self._partial_logits(batch, cache, by_span, tuple(layers)))
        wanted = [names[row] for row in batch.wanted_N.tolist()]
        missing = {name for name in wanted if name not in self._logits}
        missing |= {name for name in names if any((layer, name) not in self._taps for layer in taps)}
        self._compute(missing, taps)
        logits_NV = self._stack([self._logits[name] for name in wanted])
        return ModelOutput(logits_NV, {k: torch.stack([self._taps[k, name] for name in names]) for k in taps})

    def logits(self, path: Sequence[int]) -> Tensor:
        """[V], after this path."""
        self.read(path, 1)
        return self._logits[self._name(path)]

    def read(self, path: Sequence[int], num_wanted: int) -> None:
        """Remember the logits after each of the last ``num_wanted`` tokens of a path, in one pass."""
        names = self._path(self._name(path))
        self._compute({name for name in names[-num_wanted:] if name not in self._logits}, ())

    # -- names ---------------------------------------------------------------------------------------------------

    def _name_rows(self, span: Span, cache: KVCache) -> list[int]:
        """The names of a span's rows, which are written to their slots as a model would write keys."""
        feed = span.feed
        written: list[int] = cache.keys[0][span.key_slots].flatten().tolist()
        trunk_end = feed.past + feed.num_trunk
        first = trunk_end + feed.skipped if feed.skipped else feed.past
        root = self._name(join(cache.source(feed.sequence), ()))
        for place, token in enumerate(feed.tokens, first):
            before = place - 1
            if place >= trunk_end:  # a node: its parent is the latest node it sees, or the trunk's end
                others = feed.ancestors[place - trunk_end - feed.skipped] & ~(1 << (place - trunk_end))
                before = trunk_end + others.bit_length() - 1
            written[place] = self._child(written[before] if before >= 0 else root, token)
        cache.keys[0][span.key_slots] = torch.tensor(written, device=self.info.device).view(-1, 1, 1)
        return written[first:]

    def _child(self, parent: int, token: int) -> int:
        name = self._ids.setdefault((parent, token), len(self._tokens))
        if name == len(self._tokens):
            self._parents.append(parent)
            self._tokens.append(token)
        return name

    def _name(self, path: Sequence[int]) -> int:
        name = ROOT
        for token in path:
            name = self._child(name, token)
        return name

    def _path(self, name: int) -> list[int]:
        """The names from the root's child down to this one."""
        path = []
        while name != ROOT:
            path.append(name)
            name = self._parents[name]
        return path[::-1]

    def _text(self, path: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Source and tokens of a path of names."""
        return split([self._tokens[name] for name in path])

    # -- real passes ---------------------------------------------------------------------------------------------

    def _compute(self, missing: set[int], taps: Sequence[int]) -> None:
        """Fill in what is missing, longest paths first: they cover the missing rows above them."""
        feeds: list[tuple[Feed, list[int]]] = []
        covered: set[int] = set()
        num_rows = 0
        for path in sorted(map(self._path, missing), key=len, reverse=True):
            if path[-1] in covered:
                continue
            sequence, (source, tokens) = str(path[-1]), self._text(path)
            path = path[len(source) :]
            past = self._rows.open(sequence, tokens, source)
            if num_rows >= _ROWS_A_PASS or not self._rows.reserve(sequence, len(path) - past):
                self._rows.release(sequence)
                self._run(feeds, taps)
                feeds, num_rows = [], 0
                past = self._rows.open(sequence, tokens, source)
                reserved = self._rows.reserve(sequence, len(path) - past)
                assert reserved, f"a memo of {self._rows.capacity} rows cannot hold a text of {len(path)}"
            first = next(i for i in range(past, len(path)) if path[i] in missing)
            feeds.append((Feed(sequence, tokens[past:], past, len(path) - first), path[past:]))
            covered.update(path[past:])
            num_rows += len(path) - past
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
            _, tokens = self._text(self._path(path[-1]))
            self._rows.commit(feed.sequence, range(len(path)), tokens)
            self._rows.release(feed.sequence)

    def _partial_logits(
        self, batch: Batch, cache: KVCache, by_span: list[list[int]], layers: tuple[int, ...]
    ) -> Tensor:
        """Of a pass through some layers, whose law also depends on how many rows before were computed by all."""
        results = []
        for span, names in zip(batch.spans, by_span, strict=True):
            num_full = cache.length(span.feed.sequence)
            assert not span.feed.ancestors, "drafting with some of the layers goes along a chain"
            for name in names[len(names) - span.feed.num_wanted :]:
                key = (layers, num_full, name)
                if key not in self._partial:
                    self._partial[key] = self._run_partial(name, num_full, layers)
                results.append(self._partial[key])
        return self._stack(results)

    def _run_partial(self, name: int, num_full: int, layers: tuple[int, ...]) -> Tensor:
        """The last row of a path whose first ``num_full`` rows were computed by all layers, the rest by these."""
        path = self._path(name)
        source, tokens = self._text(path)
        path = path[len(source) :]
        found = self._rows.open("partial", tokens[: num_full + 1], source)
        if found < num_full:
            self._rows.release("partial")
            self._compute({path[num_full - 1]}, ())
            found = self._rows.open("partial", tokens[: num_full + 1], source)
        reserved = self._rows.reserve("partial", len(path) - num_full)
        assert reserved and found == num_full, (found, num_full)
        self.num_passes += 1
        batch = lay_out([Feed("partial", tokens[num_full:], num_full, 1)], self._rows, self.info.device)
        logits_V = self.model.forward(batch, self._rows, layers=layers).logits_NV[0].clone()
        self._rows.release("partial")  # nothing committed: these rows are no one else's
        return logits_V

    def _stack(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)) if rows else torch.empty(0, self.info.vocab_size, device=self.info.device)
