"""The head of a GGUF file: its settings, and where which tensor lies.

It does not know models. The one trick: a vocabulary, nearly all of a head, is stepped over, not read; with it, the
`gguf` package's reader takes seconds. Nothing is believed: each length is checked against the file's end first.

    file     "GGUF", version, number of tensors, number of settings; then settings, then tensors; little-endian
    setting  name, type, value; a text is its length and its bytes, a list its type, its length and its values
    tensor   name, shape (inputs first), type, where its data begin behind the head, which ends at a whole alignment
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

from ..errors import ModelError
from .linear import Array

Kind = GGMLQuantizationType
_FORMATS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.BOOL: "?", GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
_VERSIONS = (2, 3)
_LONGEST_NAME = 256
_ALIGNMENT = 32  # unless it says otherwise


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of texts that was stepped over: only its length is known."""

    length: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """shape: outputs first, as transformers has it. rows: the bytes, [outputs, bytes of one]; a vector is one row."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    rows: Array


@dataclass(frozen=True, slots=True)
class GgufFile:
    """settings: values by name. kinds: their types, as `GGUFWriter` wants them."""

    path: Path
    settings: Mapping[str, Any]
    kinds: Mapping[str, tuple[GGUFValueType, GGUFValueType | None]]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", ""))

    def write_settings(self, path: Path, more: Mapping[str, int]) -> None:
        """Another file with the same settings and ``more``, without a vocabulary and without tensors."""
        writer = GGUFWriter(path, self.architecture)
        for name, value in self.settings.items():
            listed = isinstance(value, Listed) or (isinstance(value, list) and name.startswith("tokenizer."))
            if name != "general.architecture" and not listed and value != []:
                writer.add_key_value(name, value, *self.kinds[name])
        for name, number in more.items():
            writer.add_uint32(name, number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()


FACTORS = "rope_freqs.weight"  # what Llama 3's frequencies are divided by


def scaling_of(file: GgufFile) -> str | None:
    """How the file's settings scale rotations, in words; None if they do not. transformers would not notice."""
    prefix, settings = f"{file.architecture}.rope", file.settings
    factor = settings.get(f"{prefix}.scaling.factor", settings.get(f"{prefix}.scale_linear", 1.0))
    size = settings.get(f"{prefix}.scaling.attn_factor", 1.0)
    kind = settings.get(f"{prefix}.scaling.type", "none" if factor in (0.0, 1.0) else "linear")  # as llama.cpp has it
    if kind == "none" and size == 1.0:
        return None
    return f"its rotations are scaled ({prefix}.scaling.type {kind!r})"


def partly_rotated(file: GgufFile) -> str | None:
    """That only a part of each head is rotated, in words; None if all is. transformers would turn it whole."""
    names = ("rope.dimension_count", "attention.key_length", "embedding_length", "attention.head_count")
    part, width, hidden, heads = (file.settings.get(f"{file.architecture}.{name}") for name in names)
    if width is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        width = hidden // heads
    return None if width is None or part in (None, width) else f"of heads of {width} numbers only {part!r} are rotated"


UNREAD: Mapping[str, tuple[float, ...]] = {  # settings that change what a model says, and where they do not
    "attention.scale": (0.0,), "attention.output_scale": (0.0, 1.0), "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,), "attention.causal": (True,), "attention.sliding_window": (0,),
    "attention.temperature_length": (0,), "attention.temperature_scale": (0.0,), "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,), "router_logit_softcapping": (0.0,), "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0), "activation_sparsity_scale": (0.0,),
    "swiglu_clamp_exp": (0.0,), "swiglu_clamp_shexp": (0.0,), "swin_norm": (False,), "nextn_predict_layers": (0,),
    "rope.dimension_sections": (0,), "rope.scaling.alpha": (0.0, 1.0),
}  # fmt: skip


def unread_setting(file: GgufFile) -> str | None:
    """A setting that neither transformers nor we read of one of our architectures, in words; None if all such are as
    usual."""
    return next((words for own in UNREAD if (words := _unusual(file, own)) is not None), None)


def differing_setting(file: GgufFile, config: Any) -> str | None:
    """The same of any architecture, by the config that transformers made of the file: a setting that its model has by
    the same name, with another value. What it would be by another name, or not at all, is not known here."""
    for own in UNREAD:
        words, last = _unusual(file, own), own.rpartition(".")[2]
        if words is None or not hasattr(config, last):
            continue
        value, taken = file.settings[f"{file.architecture}.{own}"], getattr(config, last)
        numbers = isinstance(value, float | int) and isinstance(taken, float | int)
        if not numbers or not math.isclose(value, taken, rel_tol=1e-6):
            return f"{words} (its model has {taken!r})"
    return None


def _unusual(file: GgufFile, own: str) -> str | None:
    name = f"{file.architecture}.{own}"
    value, context = (file.settings.get(one) for one in (name, f"{file.architecture}.context_length"))
    values = value if isinstance(value, list) else [] if value is None else [value]
    if all(one in UNREAD[own] for one in values):
        return None
    if own == "attention.sliding_window" and isinstance(value, int) and isinstance(context, int) and value >= context:
        return None
    return f"its setting {name} is {value!r}, which is not read"


def open_gguf(path: Path) -> GgufFile:
    """Map a file. Raises ModelError, naming what is wrong, for one that is cut short or no GGUF file."""
    try:
        data = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    cursor = _Cursor(path, data.data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it does not begin with GGUF")
    version, num_tensors, num_settings = cursor.unpack("IQQ")
    if version not in _VERSIONS:
        raise ModelError(f"{path} has version {version} of GGUF, and {_VERSIONS[0]} and {_VERSIONS[1]} are known here")
    settings: dict[str, Any] = {}
    kinds: dict[str, tuple[GGUFValueType, GGUFValueType | None]] = {}
    for _ in range(num_settings):
        name = cursor.name()
        settings[name], kinds[name] = cursor.setting(name)
    if settings.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{path} is one of {settings['split.count']} parts; join them with llama-gguf-split --merge")
    lines = [cursor.tensor() for _ in range(num_tensors)]
    alignment = settings.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path} wants its tensors at multiples of {alignment!r} bytes")
    begin = -(-cursor.place // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in lines:
        if name in tensors:
            raise ModelError(f"{path} has two tensors {name}")
        tensors[name] = _tensor(path, data, name, shape, number, begin + offset)
    return GgufFile(path, settings, kinds, tensors)


def _tensor(path: Path, data: Array, name: str, shape: tuple[int, ...], number: int, place: int) -> Tensor:
    try:
        kind = Kind(number)
    except ValueError:
        raise ModelError(f"{path} has a tensor of a type that is not known here: {name} is of type {number}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ModelError(f"{path}: {name} has the shape {list(shape)}, and {kind.name} comes in blocks of {block}")
    row_bytes = shape[-1] // block * block_bytes
    num_rows = 1
    for size in shape[:-1]:
        num_rows *= size
    if (stop := place + num_rows * row_bytes) > len(data):
        raise ModelError(f"{path} is truncated: {name} ends at byte {stop}, and the file at {len(data)}")
    return Tensor(name, kind, shape, data[place:stop].reshape(num_rows, row_bytes))


class _Cursor:
    """Reads a head from its beginning."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.place = path, data, 0

    def take(self, num_bytes: int) -> memoryview:
        stop = self.place + num_bytes
        if stop > len(self.data):
            raise ModelError(f"{self.path} is truncated: it ends at byte {len(self.data)}, and its head goes on")
        taken = self.data[self.place : stop]
        self.place = stop
        return taken

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def text(self) -> str:
        (length,) = self.unpack("Q")
        return bytes(self.take(length)).decode("utf-8", errors="replace")

    def name(self) -> str:
        name = self.text()
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ModelError(f"{self.path} is damaged: its head has a name that begins with {name[:16]!r}")
        return name

    def setting(self, name: str) -> tuple[Any, tuple[GGUFValueType, GGUFValueType | None]]:
        kind = self._kind(name)
        if kind == GGUFValueType.STRING:
            return self.text(), (kind, None)
        if kind != GGUFValueType.ARRAY:
            return self.unpack(_FORMATS[kind])[0], (kind, None)
        own = self._kind(name)
        (length,) = self.unpack("Q")
        if own == GGUFValueType.ARRAY:
            raise ModelError(f"{self.path}: its setting {name} is a list of lists")
        if own == GGUFValueType.STRING:
            for _ in range(length):
                self.take(int.from_bytes(self.take(8), "little"))
            return Listed(length), (kind, own)
        data = self.take(length * struct.calcsize(_FORMATS[own]))
        return np.frombuffer(data, np.dtype(_FORMATS[own]).newbyteorder("<")).tolist(), (kind, own)

    def _kind(self, name: str) -> GGUFValueType:
        (number,) = self.unpack("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ModelError(f"{self.path}: its setting {name} is of type {number}, which is not known here") from None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of its type, offset."""
        name = self.name()
        (num_dims,) = self.unpack("I")
        shape = self.unpack(f"{num_dims}Q") if num_dims <= 4 else ()
        number, offset = self.unpack("IQ")
        return name, tuple(reversed(shape)), number, offset
