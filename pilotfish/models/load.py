"""From a name to a model and its tokenizer: a hub id, a local folder, a GGUF file, ``demo``, or loaded objects.

It does not know engines or drafters. The one trick: every way to fail at loading ends in a ModelError that names the
path and what to do.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, OptionError
from .base import CausalLM
from .demo import demo_folder
from .huggingface import HuggingFaceLM
from .tokenizer import Tokenizer

DEMO = "demo"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How weights are loaded. Raises OptionError for an unknown dtype or device."""

    dtype: str = field(default="auto", metadata={"help": "auto (as stored), float32, bfloat16, float16 or float64"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda, cuda:1, mps, ..."})

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in _DTYPES:
            raise OptionError(f"dtype must be auto, {', '.join(_DTYPES)}, not {self.dtype!r}")
        self.torch_device  # noqa: B018 -- raises if there is no such device

    @property
    def torch_device(self) -> torch.device:
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(f"device {self.device!r} cannot be used: {str(error).splitlines()[0]}") from error
        return device


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. tokenizer: None if there is none; then prompts are token ids."""

    model: CausalLM
    tokenizer: Tokenizer | None


def load(name: str | Path, *, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a causal LM and its tokenizer.

    Raises ModelError if it cannot be found, read, or run here.
    """
    options = LoadOptions(dtype=dtype, device=device)
    if str(name) == DEMO:
        return _load_from(str(demo_folder()), DEMO, options)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        return _load_from(str(path.parent), str(name), options, gguf_file=path.name)
    if path.exists():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        return _load_from(str(path), str(name), options)
    if path.is_absolute() or str(name).startswith((".", "~")):
        raise ModelError(f"there is no folder {path}")
    return _load_from(str(name), str(name), options)


def from_objects(model: Any, tokenizer: Any = None, name: str = "") -> Loaded:
    """Wrap a loaded Hugging Face model and tokenizer (or None). The model stays usable by its owner."""
    if isinstance(model, HuggingFaceLM):
        return Loaded(model, None if tokenizer is None else Tokenizer(tokenizer))
    return Loaded(HuggingFaceLM(model, name), None if tokenizer is None else Tokenizer(tokenizer))


def _load_from(source: str, name: str, options: LoadOptions, gguf_file: str | None = None) -> Loaded:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    weights: dict[str, Any] = {} if gguf_file is None else {"quantization_config": GgufConfig(dequantize=True)}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=_DTYPES.get(options.dtype, "auto"), output_loading_info=True, **extra, **weights
        )
    except Exception as error:  # transformers, safetensors and the hub raise a dozen unrelated kinds
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would make them up
        raise ModelError(f"model {name!r} is incomplete: {len(missing)} weights are missing, {missing[0]} for one")
    try:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(source, **extra))
    except Exception as error:
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {_first_line(error)}") from error
    return Loaded(HuggingFaceLM(model.to(options.torch_device), name), tokenizer)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
