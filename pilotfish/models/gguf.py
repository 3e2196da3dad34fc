"""A GGUF file used as it is: its own numbers in our tiles, without a float model in between.

It does not know blocks (`gguf_blocks`), tiles or the cache. The one trick: what a model of this file looks like is not
written down a second time. transformers makes one from the file's settings, without weights, and `architecture`
describes it as any other; so each tensor of the file has a weight there that says what its shape must be.

All matrices are either of 4 bits or GROUPED (`products`). The parts of a fused one become the same; so do embedding and
head, which are GROUPED always: every token's law hangs on them.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ModelError
from .architecture import Architecture, describe, eos_ids, unsupported, weights
from .gguf_blocks import TO_4_BITS, NotFiniteError, pack_blocks, values_of
from .gguf_file import FACTORS, Tensor, open_gguf, partly_rotated, scaling_of, unread_setting
from .linear import Array, Packed, unpack
from .options import GGUF, bits_of
from .products import GROUP, GROUPED, TILE_BYTES
from .quantize import Origin, obstacle, write

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_WAY_OUT = "use quantization 'none', 'int8' or 'int4', which dequantise it"
_NAMES = {
    "embedding": ("token_embd",), "head": ("output",), "norm": ("output_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"), "o": ("attn_output",), "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",), "norm_1": ("attn_norm",), "norm_2": ("ffn_norm",), "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
}  # fmt: skip
_COUNTS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_MATRICES = ("embedding", "head", "qkv", "o", "gate_up", "down")
_NUMBERS_AT_ONCE = 1 << 20  # that one thread takes: with fewer, threads wait for each other more than they work
_CHECKED_TILES = 4  # of each tensor


def write_gguf_model(path: Path, name: str, folder: Path, key: str) -> str:
    """Fill a folder as `quantize.read` wants it. name: of the model, in errors. Returns what was converted, in words.

    Raises ModelError, naming the tensor or setting, for a file that is damaged or that our decoder does not run.
    """
    model = _FileModel(path, name)
    write(folder, key, model.origin, model.arrays(), model.conversions.describe)
    return model.conversions.describe()


@dataclass(slots=True)
class _Conversions:
    """Per type and bits the squares of errors and of values, over some tiles of every matrix."""

    sums: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, tensor: Tensor, rows: Array, packed: tuple[Array, Array], bits: int) -> None:
        """rows: in the order of the packed ones. Compared with what the `gguf` package reads there."""
        inputs, num_tiles = tensor.shape[-1], -(-len(rows) // 16)
        groups, found = -(-inputs // GROUP), self.sums.setdefault((tensor.kind.name, bits), [0.0, 0.0])
        sizes = TILE_BYTES[bits] * groups, groups * (32 if bits == 4 else 16)
        for tile in sorted({i * num_tiles // _CHECKED_TILES for i in range(_CHECKED_TILES)}):
            meant = values_of(tensor.kind, rows[tile * 16 : tile * 16 + 16])
            own = [part[tile * size : (tile + 1) * size] for part, size in zip(packed, sizes, strict=True)]
            values = unpack(Packed(bits, inputs, len(meant), own[0], own[1], np.zeros(16, np.float32))).numpy()
            found[0] += float(np.square(values - meant, dtype=np.float64).sum())
            found[1] += float(np.square(meant, dtype=np.float64).sum())

    def describe(self) -> str:
        """For a line: "Q4_K to 4 bits (0.02 % off), Q8_0 to 8 bits (exact)"."""
        words = []
        for (kind, bits), (errors, squares) in sorted(self.sums.items()):
            off = f"{100 * (errors / squares) ** 0.5:.2g} % off" if errors else "exact"
            words.append(f"{kind} to {4 if bits == 4 else 8} bits ({off})")
        return ", ".join(words)


class _FileModel:
    """A file, and what transformers' model of it looks like."""

    def __init__(self, path: Path, name: str):
        self.name, self.file, self.conversions = name, open_gguf(path), _Conversions()
        if (arch := self.file.architecture) not in ARCHITECTURES:
            raise self.error(f"its architecture {arch!r} is not one of {', '.join(ARCHITECTURES)}; {_WAY_OUT}")
        if (reason := scaling_of(self.file) or partly_rotated(self.file) or unread_setting(self.file)) is not None:
            raise self.error(f"{reason}; use the model's own folder")
        self.tied = "output.weight" not in self.file.tensors
        self.model = self._without_weights(arch)
        facts = replace(describe(self.model), tied=self.tied)
        if (reason := obstacle(facts)) is not None:
            raise self.error(f"{reason}; {_WAY_OUT}")
        self.expected = list(weights(self.model, facts))
        matrix_bits = {ours: self._bits(ours) for ours, _ in self.expected if _last(ours) in _MATRICES}
        eos = tuple(sorted(eos_ids(self.model)))
        self.origin = Origin(facts, type(self.model).__name__, eos, bits_of(GGUF), matrix_bits)
        self._refuse_tensors()

    def error(self, words: str) -> ModelError:
        return ModelError(f"model {self.name!r} cannot be used as it is: {words}")

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """As `quantize.Quantised` names them."""
        facts = self.origin.architecture
        biased = {name for name, _ in self.expected if name.endswith(".bias")}
        for ours, parts in self.expected:
            kind = _last(ours)
            if kind in _MATRICES:
                bits = self.origin.bits_of(ours)
                pieces = [piece for tensor in self._tensors(ours) for piece in self._pack(tensor, bits)]
                yield f"{ours}.weights", np.concatenate([piece[0] for piece in pieces])
                yield f"{ours}.scales", np.concatenate([piece[1] for piece in pieces])
                bias = np.zeros(-(-sum(part.shape[0] for part in parts) // 16) * 16, np.float32)
                if f"{ours}.bias" in biased:
                    bias[:] = np.concatenate([self._vector(tensor) for tensor in self._tensors(f"{ours}.bias")])
                yield f"{ours}.bias", bias
            elif ours.startswith("frequencies."):
                yield ours, self._frequencies(parts[0].float().numpy(), facts)
            elif kind != "bias":
                yield ours, np.concatenate([self._vector(tensor) for tensor in self._tensors(ours)])

    def _pack(self, tensor: Tensor, bits: int) -> list[tuple[Array, Array]]:
        """Weights and scales, in pieces that follow each other."""
        order = self._order(tensor)
        step = max(16, _NUMBERS_AT_ONCE // tensor.shape[-1] // 16 * 16)

        def rows(start: int) -> Array:
            part = slice(start, start + step)
            return tensor.rows[part] if order is None else tensor.rows[order[part]]

        starts = range(0, len(tensor.rows), step)
        try:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                pieces = list(threads.map(lambda start: pack_blocks(tensor.kind, rows(start), bits), starts))
        except NotFiniteError:
            raise self.error(
                f"{tensor.name} ({tensor.kind.name}) holds a NaN, an infinity or a number beyond float16"
            ) from None
        except NotImplementedError:
            raise self.error(f"{tensor.name} is of type {tensor.kind.name}, which is not known here") from None
        middle = len(starts) // 2
        self.conversions.add(tensor, rows(starts[middle]), pieces[middle], bits)
        return pieces

    def _order(self, tensor: Tensor) -> Array | None:
        """llama.cpp turns neighbours against each other, and we a head's halves; so it moved the rows of Llama's
        queries and keys, and they are moved back. For the others it has a function of our kind."""
        facts, name = self.origin.architecture, tensor.name.rsplit(".", 2)[-2]
        if self.file.architecture != "llama" or name not in ("attn_q", "attn_k"):
            return None
        heads = facts.num_heads if name == "attn_q" else facts.num_key_heads
        order: Array = np.arange(heads * facts.head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return order

    def _vector(self, tensor: Tensor) -> Array:
        values: Array = values_of(tensor.kind, tensor.rows)[0]
        if not np.isfinite(values).all():
            raise self.error(f"{tensor.name} holds a NaN or an infinity")
        order = self._order(tensor)
        return values if order is None else np.take(values, order)

    def _frequencies(self, frequencies: Array, facts: Architecture) -> Array:
        if FACTORS not in self.file.tensors:
            return frequencies
        tensor = self.file.tensors[FACTORS]
        if tensor.shape != frequencies.shape:
            raise self.error(f"{FACTORS} has the shape {list(tensor.shape)} instead of {list(frequencies.shape)}")
        divided: Array = frequencies / self._vector(tensor)
        return divided

    # -- what the file says of itself ----------------------------------------------------------------------------

    def _without_weights(self, arch: str) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._refuse_settings(arch)
        settings, embedding = self.file.settings, self._tensor("token_embd.weight")
        more = {} if f"{arch}.vocab_size" in settings else {f"{arch}.vocab_size": embedding.shape[0]}
        try:
            with tempfile.TemporaryDirectory(prefix="pilotfish-") as folder:
                self.file.write_settings(Path(folder, "settings.gguf"), more)
                config: Any = AutoConfig.from_pretrained(folder, gguf_file="settings.gguf")
            config.tie_word_embeddings = self.tied
            if (width := settings.get(f"{arch}.attention.key_length")) is not None:  # not read for all families
                config.head_dim = width
            config.eos_token_id = settings.get("tokenizer.ggml.eos_token_id")
            if config.model_type == "mistral":
                config.sliding_window = None  # what a class has by default is one checkpoint's, not this file's
            reason = unsupported(config)
            if reason is None:
                with torch.device("meta"):
                    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
                model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its numbers are wanted
                return model
        except Exception as error:  # transformers raises a dozen unrelated kinds
            raise self.error(f"its settings make no model: {type(error).__name__}: {error}".splitlines()[0]) from error
        raise self.error(f"{reason}; {_WAY_OUT}")

    def _refuse_settings(self, arch: str) -> None:
        """Missing ones, for which transformers would take those of another model, and senseless ones."""
        settings = self.file.settings
        for name in (f"{arch}.{own}" for own in _COUNTS):
            value = settings.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.error(f"its setting {name} must be a whole number from 1, not {value!r}")
        name = f"{arch}.attention.layer_norm_rms_epsilon"
        if not isinstance(settings.get(name), float):
            raise self.error(f"its setting {name} must be a number, not {settings.get(name)!r}")
        self._tensor(f"blk.{settings[f'{arch}.block_count'] - 1}.attn_norm.weight")  # layers are made before tensors

    def _tensor(self, name: str) -> Tensor:
        if name not in self.file.tensors:
            raise self.error(f"the tensor {name} is missing")
        return self.file.tensors[name]

    def _tensors(self, ours: str) -> list[Tensor]:
        return [self._tensor(name) for name in _names(ours)]

    def _bits(self, ours: str) -> int:
        fits = ours not in ("embedding", "head") and all(part.kind in TO_4_BITS for part in self._tensors(ours))
        return 4 if fits else GROUPED

    def _refuse_tensors(self) -> None:
        """Missing ones, those of another shape than the model's, and those that it has no use for."""
        known = {FACTORS}
        for ours, parts in self.expected:
            if ours.startswith("frequencies."):
                continue
            for tensor, part in zip(self._tensors(ours), parts, strict=True):
                known.add(tensor.name)
                if tensor.shape != tuple(part.shape):
                    raise self.error(
                        f"{tensor.name} has the shape {list(tensor.shape)}, and by the file's settings "
                        f"{list(part.shape)}"
                    )
        if unknown := sorted(set(self.file.tensors) - known):
            raise self.error(
                f"it has {len(unknown)} tensors that its architecture {self.file.architecture!r} has no use for, "
                f"{unknown[0]} for one; use the model's own folder"
            )


def names_read(model: Any) -> set[str]:
    """The file's names of all weights that a transformers model of one of our architectures has."""
    found = weights(model, describe(model))
    return {name for ours, _ in found if not ours.startswith("frequencies.") for name in _names(ours)}


def _names(ours: str) -> list[str]:
    """A weight's parts, or a bias's, under the file's names."""
    matrix = ours.removesuffix(".bias")
    layer, dot, kind = matrix.rpartition(".")
    ending = "bias" if matrix != ours else "weight"
    return [f"blk.{layer}.{name}.{ending}" if dot else f"{name}.{ending}" for name in _NAMES[kind]]


def _last(ours: str) -> str:
    return ours.rsplit(".", 1)[-1]
