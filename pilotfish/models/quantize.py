"""From a loaded model to quantised weights, in memory or in the user's cache folder, memory-mapped from there.

It does not know how they are run (`quantized` does). The one trick: the bytes are stored as the compiled loops read
them, so opening a stored model is mapping one file: nothing is parsed, copied or repacked, and pages that are never
read (most of an embedding) are never loaded.

    folder   index.json   the key it was made for, the architecture, and each array's type, shape and place
             weights.bin  the arrays, each at a multiple of 64 bytes
             tokenizer/   of a GGUF file only: its own, in transformers' form

No data is needed: activations are quantised per row as they come, and weights by their own size.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ModelError
from ..version import VERSION
from .architecture import Architecture, describe, eos_ids, fused, unsupported, weights
from .disk_cache import cache_folder, drop, prepared
from .linear import Array, pack
from .memory import opened

FORMAT = 3  # raised when the bytes mean something else
_MATRICES = ("embedding", "head", "qkv", "o", "gate_up", "down")
_KEPT_AT_8_BITS = ("embedding", "head")  # in an int4 model too: every token's law hangs on them
_ALIGNMENT = 64
_SAMPLES, _SAMPLE_BYTES = 32, 2048  # of each file, evenly


class QuantisationError(ModelError):
    """This model's layers are not of a kind or shape that can be quantised; in float it runs."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a quantised model is told about the one it was made from. bits: of its matrices, `products.GROUPED` if they
    are a GGUF file's own. matrix_bits: of those that have others."""

    architecture: Architecture
    class_name: str
    eos_ids: tuple[int, ...]
    bits: int
    matrix_bits: Mapping[str, int] = field(default_factory=dict)

    def bits_of(self, matrix: str) -> int:
        """8, 4 or GROUPED, by a matrix's name."""
        usual = 8 if self.bits == 4 and matrix in _KEPT_AT_8_BITS else self.bits
        return self.matrix_bits.get(matrix, usual)


@dataclass(frozen=True, slots=True)
class Quantised:
    """arrays: packed matrices as ``name.weights``, ``name.scales``, ``name.bias`` and everything else in float32 under
    the names of `architecture.weights`. remark: what was to be said of how it was made."""

    origin: Origin
    arrays: Mapping[str, Array]
    remark: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def obstacle(facts: Architecture) -> str | None:
    """Why a model of this shape cannot be quantised, naming the layer; None if it can."""
    if facts.head_dim % 32:
        return f"q_proj of layer 0 makes heads of {facts.head_dim}, which is not a multiple of 32"
    if facts.hidden_size % 16:
        return f"o_proj of layer 0 has {facts.hidden_size} outputs, which is not a multiple of 16"
    if facts.intermediate_size % 16:
        return f"gate_proj of layer 0 has {facts.intermediate_size} outputs, which is not a multiple of 16"
    return None


def quantise(model: Any, bits: int) -> Quantised:
    """A loaded model's weights, quantised in memory. Raises ModelError, naming the layer, if that is impossible."""
    origin = _origin(model, bits)
    return Quantised(origin, dict(_arrays(model, origin)))


def stored(key: str, name: str, bits: int, load_model: Callable[[], Any], say: Callable[[str], None]) -> Quantised:
    """The quantised model of this key from the cache folder, made first if it is not there, or is for another key.

    key: whatever identifies the weights; see `key_of`. load_model: called only if there is something to make.
    """

    def fill(folder: pathlib.Path, full_key: str) -> None:
        say(f"Quantising {name} to int{bits} in {cache_folder()} (only this once)")
        model = load_model()
        origin = _origin(model, bits)
        write(folder, full_key, origin, _arrays(model, origin))

    return read(kept(key, name, f"int{bits}", fill, say))


def kept(
    key: str, name: str, kind: str, fill: Callable[[pathlib.Path, str], None], say: Callable[[str], None]
) -> pathlib.Path:
    """The cache's folder of this model, kind and key, made by ``fill(folder, full key)`` if it is not there. Those of
    the same model and kind for other keys are deleted."""
    label = "".join(c if c.isalnum() else "-" for c in name).strip("-")[-60:]
    prefix = f"{label}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-{kind}-"
    full_key = f"{key} {kind} format {FORMAT} version {VERSION}"
    folder_name = prefix + hashlib.sha256(full_key.encode()).hexdigest()[:12]
    folder = prepared(folder_name, lambda empty: fill(empty, full_key), say)
    _drop_others(prefix, folder)
    return folder


def key_of(files: list[pathlib.Path]) -> str:
    """Identifies weights by their files' names, sizes and times, and by a few of their bytes, as copies may have a time
    that is none: reading gigabytes to be sure would cost more than the start-up it saves."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
    found = hashlib.sha256(repr(stats).encode())
    for path in sorted(files):
        size = path.stat().st_size
        with path.open("rb") as file:
            for place in range(0, size, -(-size // _SAMPLES)) if size else ():
                file.seek(place)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def write(
    folder: pathlib.Path,
    key: str,
    origin: Origin,
    arrays: Iterable[tuple[str, Array]],
    remark: Callable[[], str] = lambda: "",
) -> None:
    """Into a folder, array by array: at no time need there be more than one. remark: asked for at the end."""
    entries: dict[str, Any] = {}
    with (folder / "weights.bin").open("wb") as file:
        for name, array in arrays:
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            entries[name] = {"dtype": str(array.dtype), "shape": list(array.shape), "offset": file.tell()}
            array.tofile(file)
    facts = asdict(origin) | {"architecture": origin.architecture.to_json()}
    index = {"key": key, "origin": facts, "remark": remark(), "arrays": entries}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def read(folder: pathlib.Path) -> Quantised:
    """Map a folder that `write` made. Raises ModelError if it is not one."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        facts = index["origin"]
        origin = Origin(
            Architecture.from_json(facts["architecture"]),
            facts["class_name"],
            tuple(facts["eos_ids"]),
            facts["bits"],
            facts.get("matrix_bits", {}),
        )
        places = {}
        for name, entry in index["arrays"].items():
            kind, shape, offset = np.dtype(entry["dtype"]), tuple(entry["shape"]), int(entry["offset"])
            places[name] = (kind, shape, offset, offset + int(np.prod(shape)) * kind.itemsize)
        looked_up = () if origin.architecture.tied else ("embedding.weights", "embedding.scales")
        walked = [(start, stop) for name, (_, _, start, stop) in places.items() if name not in looked_up]
        path = folder / "weights.bin"
        data = opened(path, walked)
        mapped = np.memmap(path, np.uint8, mode="r") if looked_up else data
        arrays = {
            name: (mapped if name in looked_up else data)[start:stop].view(kind).reshape(shape)
            for name, (kind, shape, start, stop) in places.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} is not a quantised model ({error}); delete it and it is made again") from error
    return Quantised(origin, arrays, index.get("remark", ""))


def _origin(model: Any, bits: int) -> Origin:
    reason = unsupported(model.config.get_text_config())
    facts = None if reason is not None else describe(model)
    if facts is not None:
        reason = obstacle(facts)
    if facts is None or reason is not None:
        raise QuantisationError(f"{type(model).__name__} cannot be quantised: {reason}")
    return Origin(facts, type(model).__name__, tuple(sorted(eos_ids(model))), bits)


def _arrays(model: Any, origin: Origin) -> Iterator[tuple[str, Array]]:
    facts = origin.architecture
    biases = {name: parts for name, parts in weights(model, facts) if name.endswith(".bias")}
    for name, parts in weights(model, facts):
        kind = name.rsplit(".", 1)[-1]
        if kind in _MATRICES:
            bias = _finite(f"{name}.bias", fused(biases[f"{name}.bias"]), model) if f"{name}.bias" in biases else None
            packed = pack(fused(parts), origin.bits_of(name), bias, f"{name} of {type(model).__name__}")
            yield f"{name}.weights", packed.weights
            yield f"{name}.scales", packed.scales
            yield f"{name}.bias", packed.bias
        elif kind != "bias":
            yield name, _finite(name, fused(parts), model).float().cpu().numpy()


def _finite(name: str, vector: Tensor, model: Any) -> Tensor:
    """The vector itself. Raises ModelError, naming it, for a NaN or an infinity, as `pack` does for matrices."""
    if not bool(vector.isfinite().all()):
        raise ModelError(f"{name} of {type(model).__name__} cannot be quantised: it holds a NaN or an infinity")
    return vector


def _drop_others(prefix: str, keep: pathlib.Path) -> None:
    """Earlier versions of the same model, or of weights that have changed since, are of no use to anybody. Nor is what
    a killed process left unfinished; while one is at work, it holds the lock."""
    names = {path.name.removesuffix(".lock").removesuffix(".partial") for path in keep.parent.glob(f"{prefix}*")}
    for name in names - {keep.name}:
        drop(keep.with_name(name))
