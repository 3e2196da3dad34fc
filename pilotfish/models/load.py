"""From a name to a model and its tokenizer: a hub id, a local folder, a GGUF file, ``demo``, or loaded objects.

It does not know engines or drafters. The one trick: every way to fail at loading ends in a ModelError that names the
path and what to do.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..errors import ModelError, OptionError
from .architecture import unsupported
from .base import CausalLM
from .decoder import Decoder
from .demo import demo_folder
from .huggingface import HuggingFaceLM
from .linear import bits_of
from .quantize import QuantisationError, key_of, stored
from .quantized import QuantizedDecoder, slow_because
from .tokenizer import Tokenizer

DEMO = "demo"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How weights are loaded. Raises OptionError for an unknown name, or for options that contradict each other."""

    dtype: str = field(default="auto", metadata={"help": "auto (as stored), float32, bfloat16, float16 or float64"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda, cuda:1, mps, ..."})

    quantization: Literal["none", "int8", "int4"] = field(
        default="none", metadata={"help": "none (as stored), int8, or int4: smaller and faster weights, on a CPU"}
    )
    model_impl: Literal["auto", "hf", "native"] = field(
        default="auto", metadata={"help": "whose code runs the model: transformers' (hf), ours (native), or the faster"}
    )

    def __post_init__(self) -> None:
        if self.model_impl not in ("auto", "hf", "native"):
            raise OptionError(f"model_impl must be auto, hf or native, not {self.model_impl!r}")
        if bits_of(self.quantization):
            if self.model_impl == "hf":
                raise OptionError(f"quantization {self.quantization!r} needs our own decoder, not model_impl 'hf'")
            if self.dtype not in ("auto", "float32"):
                raise OptionError(f"with quantization {self.quantization!r} the rest is float32, not {self.dtype}")
            if self.device not in ("auto", "cpu"):
                raise OptionError(f"quantization {self.quantization!r} is for the CPU, not for {self.device!r}")
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


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Literal["none", "int8", "int4"] = "none",
    model_impl: Literal["auto", "hf", "native"] = "auto",
) -> Loaded:
    """Load a causal LM and its tokenizer. Arguments: see `LoadOptions`.

    Raises ModelError if it cannot be found, read, or run here.
    """
    options = LoadOptions(dtype=dtype, device=device, quantization=quantization, model_impl=model_impl)
    if not isinstance(name, str | Path):
        raise ModelError(f"a model is named by a folder, a hub id, a GGUF file or 'demo', not by {name!r}")
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
    try:
        return _load_from(str(name), str(name), options)
    except ModelError as error:
        raise ModelError(f"{error} (there is no folder {str(name)!r} here, so it was looked up on the hub)") from error


def from_objects(model: Any, tokenizer: Any = None, name: str = "") -> Loaded:
    """Wrap a loaded Hugging Face model and tokenizer (or None). The model stays usable by its owner."""
    if isinstance(model, HuggingFaceLM | Decoder | QuantizedDecoder):
        return Loaded(model, None if tokenizer is None else Tokenizer(tokenizer))
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"a loaded transformers model is wanted, not {model!r}; to load one by name use LLM(name)")
    return Loaded(HuggingFaceLM(model, name), None if tokenizer is None else Tokenizer(tokenizer))


def _load_from(source: str, name: str, options: LoadOptions, gguf_file: str | None = None) -> Loaded:
    from transformers import AutoTokenizer

    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    model: CausalLM | None = None
    if bits_of(options.quantization):
        model = _load_quantised(source, name, options, gguf_file)
    if model is None:
        model = _wrap(_load_weights(source, name, options, gguf_file), name, options)
    try:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(source, **extra))
    except Exception as error:
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {_first_line(error)}") from error
    return Loaded(model, tokenizer)


def _load_weights(source: str, name: str, options: LoadOptions, gguf_file: str | None) -> Any:
    """The Hugging Face model, on its device."""
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    weights: dict[str, Any] = {} if gguf_file is None else {
        "gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}  # fmt: skip
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=_DTYPES.get(options.dtype, "auto"), output_loading_info=True, **weights
        )
    except Exception as error:  # transformers, safetensors and the hub raise a dozen unrelated kinds
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would make them up
        raise ModelError(f"model {name!r} is incomplete: {len(missing)} weights are missing, {missing[0]} for one")
    return model.to(options.torch_device)


def _wrap(model: Any, name: str, options: LoadOptions) -> CausalLM:
    """Our decoder for the families that it knows, transformers' code for all others and on demand."""
    ours = options.model_impl == "native" or unsupported(model.config.get_text_config()) is None
    if options.model_impl != "hf" and ours:
        return Decoder(model, name)
    return HuggingFaceLM(model, name)


def _load_quantised(source: str, name: str, options: LoadOptions, gguf_file: str | None) -> CausalLM | None:
    """The quantised model, from the cache folder; None, and said so, if this model cannot be quantised."""
    try:
        quantised = stored(
            _identity(source, name, gguf_file),
            name,
            bits_of(options.quantization),
            lambda: _load_weights(source, name, options, gguf_file),
            _say,
        )
    except QuantisationError as error:
        _say(f"{name}: {error}; it runs in float")
        return None
    if (reason := slow_because()) is not None:
        _say(reason)
    return QuantizedDecoder(quantised, name)


def _identity(source: str, name: str, gguf_file: str | None) -> str:
    """What tells these weights from all others."""
    folder = Path(source)
    if gguf_file is not None:
        return key_of([folder / gguf_file])
    if not folder.is_dir():  # a hub id: its files lie in a folder named after their commit
        from transformers.utils.hub import cached_file

        try:
            folder = Path(str(cached_file(source, "config.json"))).parent
        except Exception as error:
            raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
        return f"{source} at {folder.name}"
    return key_of([path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")])


def _say(line: str) -> None:
    Console(file=sys.stderr).print(line, soft_wrap=True, markup=False, highlight=False)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
