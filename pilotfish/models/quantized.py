"""A decoder with packed weights on a CPU: a `CausalLM` whose rows do not know of each other, to the last bit.

It does not know how its arithmetic is done (`loops`, `products`) or where its weights come from (`quantize`). The one
trick: everything is an address. Python lays out what a pass needs as a few tables of integers, and one compiled call
does the rest.

With activations quantised as they come, a difference in the last bit anywhere can grow into one of several units in
the logits; so "lossless" is worth something only if a row's result is *bitwise* the same for any number of rows, any
batch and any draft. It is, and `info.bitwise` says so.
"""

import copy
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.compiled import BLOCK
from ..attention.vectors import DOT_KIND
from ..native.library import no_best
from ..paged.batch import Batch
from ..paged.cache import KVCache
from . import loops
from .base import Ends, ModelInfo, ModelOutput
from .decoder import chosen_layers
from .kernels import chosen, runner
from .linear import Array, pick_rows, unpack_rows
from .options import Kernels, name_of
from .products import GROUP, ROWS, SUMS_LINE
from .quantize import Quantised
from .turns import Turn

_ROWS_AT_ONCE = 256  # longer batches go through in parts: same bits, bounded memory
_FEW_ROWS = 16  # up to here, blocks of keys are shared out among the threads
_POSITIONS_AT_ONCE = 1024
_MATRICES = {"qkv": loops.QKV, "o": loops.OUT, "gate_up": loops.GATE_UP, "down": loops.DOWN}
_VECTORS = {"norm_1": loops.NORM_1, "norm_2": loops.NORM_2, "post_1": loops.POST_1, "post_2": loops.POST_2,
            "q_norm": loops.Q_NORM, "k_norm": loops.K_NORM, "embedding_norm": loops.EMBEDDING_NORM}  # fmt: skip


def slow_because() -> str | None:
    """What this CPU lacks for int8 at full speed, to be said once; None if nothing. Sums are exact either way."""
    if DOT_KIND.startswith("vnni"):
        return None
    return "this CPU has no VNNI instructions: int8 products take two to four times as long (the results are the same)"


class QuantizedDecoder:
    """See the module. Keys and values are float32. One pass at a time: threads that share a model wait for each other.

    joined: it is a draft head of one layer, whose rows start from given states; see `forward` and `loops.run_pass`.
    kernels: see `kernels.runner`.
    """

    def __init__(self, quantised: Quantised, name: str, *, joined: int = 0, kernels: Kernels = "auto"):
        self.quantised = quantised
        self._runner = runner(kernels)
        self._finds_best = chosen(kernels) is not None
        origin, facts = quantised.origin, quantised.origin.architecture
        self.architecture = facts
        self.info = ModelInfo(
            name=name,
            architecture=origin.class_name,
            vocab_size=facts.vocab_size,
            context=facts.context,
            layers=facts.layer_shapes,
            hidden_size=facts.hidden_size,
            num_bytes=quantised.num_bytes,
            dtype=torch.float32,
            device=torch.device("cpu"),
            eos_ids=frozenset(origin.eos_ids),
            quantization=name_of(origin.bits),
            bitwise=True,
            implementation="native",
            kernels=kernels,
        )
        arrays = quantised.arrays
        self._sizes = np.array(
            [facts.hidden_size, facts.num_heads, facts.num_key_heads, facts.head_dim, facts.intermediate_size,
             facts.vocab_size, facts.activation == "gelu_tanh",
             loops.scratch_bytes(facts.head_dim, facts.num_heads // facts.num_key_heads), joined],
            np.int64)  # fmt: skip
        self._factors = np.array([facts.norm_epsilon, facts.attention_scale, facts.embedding_scale], np.float32)
        self._ends = np.array([self._matrix("embedding"), self._matrix(self._head_name),
                               [arrays["norm"].ctypes.data, 0, 0, 0]], np.int64)  # fmt: skip
        self._all_layers: Sequence[int] = range(facts.num_layers)
        self._layers = np.array([self._layer(i) for i in range(facts.num_layers)], np.int64)
        self._head: tuple[Array, ...] = ()
        self._tables: WeakKeyDictionary[KVCache, Array] = WeakKeyDictionary()
        self._turns: list[tuple[Array, Array]] = []
        self._num_positions = 0
        self._turn = Turn()  # of passes: they share buffers
        self._buffers: dict[tuple[int, int], tuple[Array, Array]] = {}

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=torch.float32)

    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        *,
        taps: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        starts: tuple[Tensor, Tensor] | None = None,
    ) -> ModelOutput:
        """See `CausalLM`. starts: of a draft head, each row's state and embedded token, float32 [T, hidden]."""
        with self._turn.lock:
            return self._forward(batch, cache, taps, layers, starts)

    def _forward(
        self,
        batch: Batch,
        cache: KVCache,
        taps: Sequence[int],
        layers: Sequence[int] | None,
        starts: tuple[Tensor, Tensor] | None,
    ) -> ModelOutput:
        assert (starts is not None) == bool(self._sizes[loops.JOINED])
        facts, rows = self.architecture, _Rows(batch)
        running = chosen_layers(facts.num_layers, taps, layers) if taps or layers is not None else self._all_layers
        table = self._table(cache)
        if layers is not None:
            table = table[list(layers)]
        self._grow_turns(max(batch.positions) + 1)
        tapped = {layer: torch.empty(batch.num_rows, facts.hidden_size) for layer in taps}
        logits = np.empty((len(rows.wanted), stride_of(self.num_logits)), np.float32)
        # Made before the pass, which leaves nothing of torch in the cache: afterwards it takes twenty times as long.
        output = ModelOutput(torch.from_numpy(logits[:, : self.num_logits]), tapped)
        best = None
        if self._finds_best and batch.num_rows <= _ROWS_AT_ONCE:
            best = no_best(torch.get_num_threads(), len(rows.wanted))
        num_phases = loops.PHASES_A_LAYER * len(running) + loops.OTHER_PHASES
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, batch.num_rows)
            if tapped:
                table = table.copy()
                for layer, states in tapped.items():
                    table[running.index(layer), loops.TAP] = states[start:].data_ptr()
            self._run(rows, start, stop, table, logits, num_phases, starts, best)
        if best is not None:
            output.best = best["id"][0].tolist(), best["value"][0].tolist()
        return output

    @property
    def num_logits(self) -> int:
        return int(self._sizes[loops.VOCAB])

    def with_head(self, ids: Sequence[int]) -> "QuantizedDecoder":
        """See `vocabulary.with_head`; the logits are the same to the last bit."""
        head = self._head_name
        bits = self.quantised.origin.bits_of(head)
        weights, scales, bias = (self.quantised.arrays[f"{head}.{part}"] for part in ("weights", "scales", "bias"))
        parts = pick_rows(weights, scales, bias, ids, bits)
        twin = copy.copy(self)
        twin._head = parts  # addresses keep nothing alive
        twin._sizes, twin._ends = self._sizes.copy(), self._ends.copy()
        twin._sizes[loops.VOCAB] = len(ids)
        twin._ends[1] = [*(part.ctypes.data for part in parts), bits]
        return twin

    def ends(self) -> Ends:
        facts, arrays = self.architecture, self.quantised.arrays
        norm_D = torch.from_numpy(np.array(arrays["norm"]))

        def rows(name: str, ids_N: Tensor) -> Tensor:
            bits = self.quantised.origin.bits_of(name)
            return unpack_rows(arrays[f"{name}.weights"], arrays[f"{name}.scales"], ids_N, facts.hidden_size, bits)

        return Ends(
            embed=lambda tokens_T: rows("embedding", tokens_T),
            norm=lambda states_TD: F.rms_norm(states_TD.float(), norm_D.shape, norm_D, facts.norm_epsilon),
            head_rows=lambda ids_N: rows(self._head_name, ids_N),
        )

    def _run(
        self,
        rows: "_Rows",
        start: int,
        stop: int,
        table: Array,
        logits: Array,
        num_phases: int,
        starts: tuple[Tensor, Tensor] | None,
        best: Array | None,
    ) -> None:
        """The rows start..stop-1 of a batch, all layers."""
        facts, wanted, first = self.architecture, rows.wanted, 0
        if stop - start < len(rows.positions):
            first = int(np.searchsorted(wanted, start))
            wanted = wanted[first : int(np.searchsorted(wanted, stop))] - start
        groups, num_blocks = rows.groups(start, stop)
        num_splits = num_blocks if stop - start <= _FEW_ROWS else 1
        num_threads = torch.get_num_threads() if best is None else len(best)
        addresses = self._workspace(stop - start, num_threads).copy()
        keep = None
        if num_splits > 1:
            keep = np.empty((stop - start) * facts.num_heads * num_splits * (facts.head_dim + 2), np.float32)
            addresses[loops.PARTS] = keep.ctypes.data
        for buffer, start_TD in zip((loops.STATES, loops.EMBEDDED), starts or (), strict=False):
            assert start_TD.dtype == torch.float32 and start_TD.is_contiguous()
            addresses[buffer] = start_TD[start:].data_ptr()
        addresses[loops.LOGITS] = logits.ctypes.data + first * logits.shape[1] * 4
        for i, (cosines, sines) in enumerate(self._turns):
            addresses[loops.COSINES + 2 * i] = cosines.ctypes.data
            addresses[loops.SINES + 2 * i] = sines.ctypes.data
        cut = slice(start, stop)
        addresses[loops.BEST] = 0 if best is None else best.ctypes.data
        self._runner(
            num_threads,
            num_phases,
            addresses,
            self._sizes,
            table,
            self._ends,
            self._factors,
            (rows.tokens[cut], rows.positions[cut], rows.slots[cut], wanted, groups),
            (rows.prefixes[cut], rows.bits[cut], rows.table),
            num_splits,
        )
        del keep

    # -- tables of addresses -------------------------------------------------------------------------------------

    @property
    def _head_name(self) -> str:
        return "embedding" if self.architecture.tied else "head"

    def _matrix(self, name: str) -> list[int]:
        arrays, bits = self.quantised.arrays, self.quantised.origin.bits_of(name)
        return [*(arrays[f"{name}.{part}"].ctypes.data for part in ("weights", "scales", "bias")), bits]

    def _layer(self, i: int) -> list[int]:
        row, arrays, facts = [0] * loops.NUM_COLUMNS, self.quantised.arrays, self.architecture
        for name, column in _MATRICES.items():
            row[column : column + 4] = self._matrix(f"{i}.{name}")
        for name, column in _VECTORS.items():
            if f"{i}.{name}" in arrays:
                row[column] = arrays[f"{i}.{name}"].ctypes.data
        row[loops.WINDOW], row[loops.ROPE] = facts.windows[i] or 0, facts.rotations[i]
        return row

    def _table(self, cache: KVCache) -> Array:
        """The table of layers with this cache's addresses."""
        if cache not in self._tables:
            assert all(k.dtype == torch.float32 and k.is_contiguous() for k in (*cache.keys, *cache.values))
            table = self._layers.copy()
            table[:, loops.KEYS] = [keys.data_ptr() for keys in cache.keys]
            table[:, loops.VALUES] = [values.data_ptr() for values in cache.values]
            self._tables[cache] = table
        return self._tables[cache]

    def _grow_turns(self, num_positions: int) -> None:
        """Cosines and sines of every position so far, in whole blocks: a position's values never depend on a batch."""
        if num_positions <= self._num_positions:
            return
        count = max(2 * self._num_positions, -(-num_positions // _POSITIONS_AT_ONCE) * _POSITIONS_AT_ONCE)
        positions = torch.arange(count, dtype=torch.float32)[:, None]
        turns = []
        for i, scale in enumerate(self.architecture.rotation_scales):
            angles = positions * torch.from_numpy(np.array(self.quantised.arrays[f"frequencies.{i}"]))
            turns.append(((angles.cos() * scale).numpy(), (angles.sin() * scale).numpy()))
        self._turns, self._num_positions = turns, count  # at once: Ctrl-C leaves all of them or those before

    def _workspace(self, num_rows: int, num_threads: int) -> Array:
        """Addresses of buffers for at least this many rows; padding in them is zero and stays so. num_threads: may
        change from pass to pass, and each needs its own scratch memory."""
        size = _FEW_ROWS if num_rows <= _FEW_ROWS else _ROWS_AT_ONCE
        if (size, num_threads) not in self._buffers:
            facts = self.architecture
            hidden, heads, inner = facts.hidden_size, facts.num_heads * facts.head_dim, facts.intermediate_size
            normed = 2 * hidden if self._sizes[loops.JOINED] else hidden
            widest = -(-max(normed, heads, inner) // GROUP) * GROUP
            wide = stride_of(max(hidden, facts.num_projected, 2 * inner))
            num_bytes = {
                loops.X: size * stride_of(hidden) * 4,
                loops.NORMED: size * stride_of(normed) * 4,
                loops.BYTES: size * widest,
                loops.SCALES: size * widest // GROUP * 4,
                loops.SUMS: size * widest // GROUP * SUMS_LINE // ROWS,
                loops.WIDE: size * wide * 4,
                loops.QUERIES: size * heads * 4,
                loops.ATTENDED: size * stride_of(heads) * 4,
                loops.ACTIVE: size * stride_of(inner) * 4,
                loops.SCRATCH: num_threads * int(self._sizes[loops.SCRATCH_BYTES]),
            }
            self._buffers[size, num_threads] = _buffers(num_bytes)
        addresses, _ = self._buffers[size, num_threads]
        return addresses


def stride_of(width: int) -> int:
    """See `loops.stride_of`."""
    return -(-width // GROUP) * GROUP + 16


def _buffers(num_bytes: Mapping[int, int]) -> tuple[Array, Array]:
    """A table of addresses of zeroed buffers, each at the start of a cache line, and the memory they lie in."""
    addresses = np.zeros(loops.NUM_BUFFERS, np.int64)
    memory = np.zeros(sum(size + 64 for size in num_bytes.values()), np.uint8)
    place = memory.ctypes.data
    for buffer, size in num_bytes.items():
        place += -place % 64
        addresses[buffer] = place
        place += size
    return addresses, memory


class _Rows:
    """A batch as the compiled loops want it: int64 arrays, a line per row."""

    def __init__(self, batch: Batch):
        self.tokens, self.positions = np.array(batch.tokens, np.int64), np.array(batch.positions, np.int64)
        self.wanted, self.slots = np.array(batch.wanted, np.int64), _array(batch.slots)
        self.prefixes, self.bits = np.empty(batch.num_rows, np.int64), np.zeros(batch.num_rows, np.int64)
        self.spans: list[tuple[int, int, int]] = []  # first row, end, start in the slot table
        tables: list[Array] = []
        begin = 0
        for span in batch.spans:
            feed = span.feed
            trunk_end = feed.past + feed.num_trunk
            middle = span.start + feed.num_trunk
            self.prefixes[span.start : middle] = np.arange(feed.past + 1, trunk_end + 1)
            self.prefixes[middle : span.stop] = trunk_end
            for i, bits in enumerate(feed.ancestors):
                self.bits[middle + i] = bits - (1 << 64) if bits >> 63 else bits
            slots = _array(span.slots)
            tables.append(slots)
            self.spans.append((span.start, span.stop, begin))
            begin += len(slots)
        self.table = tables[0] if len(tables) == 1 else np.concatenate(tables)

    def groups(self, start: int, stop: int) -> tuple[Array, int]:
        """Rows start..stop-1 in groups that share a sequence: [first, end, start in the slot table, blocks of keys],
        counted from ``start``; and the most blocks of any."""
        lines = []
        for first, end, table in self.spans:
            for row in range(max(first, start), min(end, stop), loops.ROWS_A_GROUP):
                last = min(row + loops.ROWS_A_GROUP, end, stop)
                keys = max(int(self.prefixes[i]) + (int(self.bits[i]) & (1 << 64) - 1).bit_count()
                           for i in range(row, last))  # fmt: skip
                lines.append((row - start, last - start, table, -(-keys // BLOCK)))
        return np.array(lines, np.int64), max(line[3] for line in lines)


def _array(slots: range | list[int]) -> Array:
    """A long range is read a number at a time otherwise."""
    return np.arange(slots.start, slots.stop) if isinstance(slots, range) else np.array(slots, np.int64)
