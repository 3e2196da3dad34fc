"""Heads on disk: a folder with config.json and model.safetensors, in float16.

It does not know architectures (`formats` does). The one trick: a folder is filled beside its place and renamed when it
is whole, and says which target it is for; so what is found is complete, and what does not fit is refused by name.

Heads for the demo model come along, in `SHIPPED`; a target that they fit needs to name none.
"""

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import DraftError, ModelError
from ..models.base import CausalLM
from ..models.load import Loaded
from ..models.tokenizer import Tokenizer
from ..version import VERSION
from . import fingerprint, formats
from .eagle3 import Eagle3Head
from .medusa import MedusaHeads

SHIPPED = Path(__file__).parent / "shipped"  # a folder per method
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_OURS = "pilotfish"  # the key in the config that other programs do not look at
Head = Eagle3Head | MedusaHeads


def save_head(head: Head, folder: str | Path, target: Loaded, notes: Mapping[str, Any] | None = None) -> Path:
    """Write a head for this target; an earlier one in the same folder is replaced when the new one is complete.

    notes: anything worth keeping beside it (how it was trained, what it reached), JSON. Raises DraftError if the folder
    holds something else than a head, or cannot be written.
    """
    folder = Path(folder).expanduser()
    if isinstance(head, Eagle3Head):
        info = target.model.info
        verifier = {"name_or_path": info.name, "architectures": [info.architecture]}
        config, tensors = formats.eagle3_json(head.config, verifier), formats.eagle3_tensors(head)
    else:
        config, tensors = formats.medusa_json(head.config), formats.medusa_tensors(head)
    config[_OURS] = {"version": VERSION, "target": fingerprint.fingerprint(target), "notes": dict(notes or {})}
    stored = {name: _half(name, tensor) for name, tensor in tensors.items()}
    try:
        with _replaced(folder) as place:
            save_file(stored, str(place / WEIGHTS), {"format": "pt"})
            (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DraftError(f"a head cannot be written to {folder}: {error.strerror or error}") from error
    return folder


def load_head(folder: str | Path, target: Loaded) -> Head:
    """The head in a folder, in float32 on the CPU, its borrowed parts taken from the target.

    Raises DraftError, naming the file, if it is missing, damaged, of an unknown kind, or for another target.
    """
    folder = Path(folder).expanduser()
    config, path = read_config(folder), folder / WEIGHTS
    info = target.model.info
    fingerprint.check(trained_for(config), target, str(folder))
    tensors = _read_weights(path)
    try:
        ends = target.model.ends()
    except ModelError as error:
        raise DraftError(f"the target cannot have heads: {error}") from error
    try:
        if kind_of(config) == "eagle3":
            return formats.eagle3_head(formats.eagle3_config(config, len(info.layers)), tensors, ends.embed)
        return formats.medusa_heads(formats.medusa_config(config), tensors, ends.head_rows)
    except DraftError as error:
        raise DraftError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise DraftError(f"{folder / CONFIG} does not describe a head: {type(error).__name__}: {error}") from error


def load_for(given: Any, model: CausalLM, tokenizer: Tokenizer | None, method: str) -> Head:
    """What a drafter's option names: a folder, or a head in memory, of which a copy is taken; None: the one that comes
    along, if it is for this target. Raises DraftError."""
    if given is None:
        given = shipped(method, Loaded(model, tokenizer))
        if given is None:
            raise DraftError(
                f"method {method!r} needs a trained head: give model= (or --draft-model), the head's folder; "
                f"`pilotfish train {method}` makes one"
            )
    if isinstance(given, nn.Module):
        head: Any = copy.deepcopy(given)
    elif isinstance(given, str | Path):
        head = load_head(given, Loaded(model, tokenizer))
    else:
        raise DraftError(f"a head is given by its folder, not as {given!r}")
    kind = "eagle3" if isinstance(head, Eagle3Head) else "medusa" if isinstance(head, MedusaHeads) else None
    if kind != method:
        raise DraftError(f"{given if kind else type(given).__name__} is for method {kind!r}, not {method!r}")
    sizes = (head.config.hidden_size, head.config.vocab_size)
    if sizes != (model.info.hidden_size, model.info.vocab_size):
        raise DraftError(
            f"the head is for a hidden size and a vocabulary of {sizes}, and {model.info.name} has "
            f"{(model.info.hidden_size, model.info.vocab_size)}: train one for it"
        )
    return head  # type: ignore[no-any-return]


def shipped(method: str, target: Loaded) -> Path | None:
    """The folder of the head that comes along for this target, by its sizes and, if it has a tokenizer, its vocabulary;
    None if there is none."""
    folder = SHIPPED / method
    if not (folder / CONFIG).is_file():
        return None
    try:
        fingerprint.check(trained_for(read_config(folder)), target, str(folder))
    except DraftError:
        return None
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a head's folder. Raises DraftError, naming the file."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise DraftError(f"there is no folder {folder} with a head")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DraftError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or kind_of(config) is None:
        raise DraftError(
            f"{path} is not the config of an EAGLE-3 head in the format of `speculators`, nor of Medusa heads; "
            "heads of other programs can be brought there with `speculators convert`"
        )
    return config


def kind_of(config: Mapping[str, Any]) -> str | None:
    """``eagle3`` or ``medusa``; None for anything else."""
    if config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    return "medusa" if config.get("model_type") == "medusa" else None


def trained_for(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint in a config; for a head that somebody else wrote, what it says of its sizes."""
    ours = config.get(_OURS)
    if isinstance(ours, dict) and isinstance(ours.get("target"), dict):
        return dict(ours["target"])
    layer, told = config.get("transformer_layer_config"), config.get("speculators_config")
    layer = layer if isinstance(layer, dict) else config
    verifier = told.get("verifier") if isinstance(told, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return {"name": name, "hidden_size": layer.get("hidden_size"), "vocab_size": layer.get("vocab_size")}


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DraftError(f"there is no file {path}")
    try:
        return load_file(str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise DraftError(f"{path} is damaged or incomplete: {error}") from error


def _half(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.cpu().contiguous().clone()
    half = tensor.detach().cpu().half().contiguous().clone()
    if not bool(half.isfinite().all()):
        raise DraftError(f"{name} of the head holds a number that float16 has not: the training diverged")
    return half


@contextlib.contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """An empty folder beside this one, that takes its place when the block ends well."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file())):
        raise DraftError(f"{folder} holds something else than a head; give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield place
        place.chmod(0o755)
        for path in place.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            before = place.with_name(place.name + ".before")
            folder.rename(before)
            place.rename(folder)
            shutil.rmtree(before, ignore_errors=True)
        else:
            place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
