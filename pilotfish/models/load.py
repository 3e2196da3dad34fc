"""From a name to a model and its tokenizer: a hub id, a local folder, a GGUF file, ``demo``, or loaded objects.

It does not know engines or drafters. The one trick: every way to fail at loading ends in a ModelError that names the
path and what to do.
"""

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ..errors import ModelError
from .adapters import AdaptedLM, adapter_folder, beside, labels_of, merged
from .architecture import quantised_by, unsupported
from .base import CausalLM
from .decoder import Decoder
from .demo import demo_folder
from .disk_cache import cache_folder
from .hub import look_up
from .options import GGUF, Kernels, bits_of
from .options import LoadOptions as LoadOptions
from .quantize import QuantisationError, kept, key_of, read, stored
from .quantized import QuantizedDecoder, slow_because
from .tokenizer import Tokenizer

DEMO = "demo"


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
    quantization: Literal["none", "int8", "int4", "gguf"] = "none",
    kernels: Kernels = "auto",
    model_impl: Literal["auto", "hf", "native"] = "auto",
    adapter: str | None = None,
    adapters: Mapping[str, str] | Sequence[str] = (),
) -> Loaded:
    """Load a language model (decoder-only or encoder-decoder) and its tokenizer. Arguments: see `LoadOptions`.

    Raises ModelError if it cannot be found, read, or run here.
    """
    options = LoadOptions(
        dtype=dtype,
        device=device,
        quantization=quantization,
        kernels=kernels,
        model_impl=model_impl,
        adapter=adapter,
        adapters=adapters,
    )
    if not isinstance(name, str | Path):
        raise ModelError(f"a model is named by a folder, a hub id, a GGUF file or 'demo', not by {name!r}")
    if options.quantization == GGUF and Path(name).suffix != ".gguf":
        raise ModelError(
            f"quantization 'gguf' uses the numbers of a .gguf file as they are, and {str(name)!r} is none; use "
            "'int8' or 'int4'"
        )
    if str(name) == DEMO:
        return _load_from(str(demo_folder()), DEMO, options)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        return _load_from(str(path.parent), str(name), options, gguf_file=path.name)
    if path.exists():
        if (path / "adapter_config.json").is_file():  # transformers would load another model, the one that it names
            raise ModelError(f"{path} is an adapter, not a model; name its base as the model, and it as the adapter")
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        return _load_from(str(path), str(name), options)
    if path.is_absolute() or str(name).startswith((".", "~")):
        raise ModelError(f"there is no folder {path}")
    look_up(str(name), _say)
    try:
        return _load_from(str(name), str(name), options)
    except ModelError as error:
        raise ModelError(f"{error} (there is no folder {str(name)!r} here, so it was looked up on the hub)") from error


def from_objects(model: Any, tokenizer: Any = None, name: str = "") -> Loaded:
    """Wrap a loaded Hugging Face model and tokenizer (or None). The model stays usable by its owner. Of a peft model,
    the adapters that are active now are a part of it; of a processor, its tokenizer."""
    if tokenizer is not None:
        from transformers import PreTrainedTokenizerBase, ProcessorMixin

        tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            found = type(tokenizer).__name__
            raise ModelError(f"a transformers tokenizer is wanted, or a processor that has one, not a {found}")
    if not isinstance(model, Decoder | QuantizedDecoder | AdaptedLM):
        from transformers import PreTrainedModel

        if type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model"):
            model = model.get_base_model()

        from .encdec import EncoderDecoder
        from .huggingface import HuggingFaceLM

        if isinstance(model, PreTrainedModel):
            model = (EncoderDecoder if model.config.is_encoder_decoder else HuggingFaceLM)(model, name)
        elif not isinstance(model, EncoderDecoder | HuggingFaceLM):
            raise ModelError(f"a loaded transformers model is wanted, not {model!r}; to load one by name use LLM(name)")
    return Loaded(model, None if tokenizer is None else Tokenizer(tokenizer))


def _load_from(source: str, name: str, options: LoadOptions, gguf_file: str | None = None) -> Loaded:
    model: CausalLM | None = None
    if options.adapter is not None:
        name = f"{name}+{Path(options.adapter).name}"
    if options.quantization == GGUF:
        assert gguf_file is not None
        return _load_as_it_is(source, name, options, gguf_file)
    if bits_of(options.quantization):
        model = _load_quantised(source, name, options, gguf_file)
    if model is None:
        wrapped: Any = _wrap(_load_weights(source, name, options, gguf_file), source, name, options, gguf_file)
        wrapped.info = replace(wrapped.info, kernels=options.kernels)  # heads that draft for it may be quantised
        return Loaded(wrapped, _tokenizer(source, name, gguf_file))
    return Loaded(model, _tokenizer(source, name, gguf_file, **_bare_config(Path(source)) if gguf_file is None else {}))


def _tokenizer(source: str, name: str, gguf_file: str | None = None, kind: Any = None, **extra: Any) -> Tokenizer:
    """kind: the class, if it is not to be found out."""
    from transformers import AutoTokenizer

    if gguf_file is not None:
        extra["gguf_file"] = gguf_file
    try:
        with _alone(source, gguf_file) as folder:
            tokenizer = Tokenizer((kind or AutoTokenizer).from_pretrained(folder, **extra))
    except Exception as error:
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {_first_line(error)}") from error
    if gguf_file is not None:
        tokenizer.hf.name_or_path = name
    return tokenizer


def _load_as_it_is(source: str, name: str, options: LoadOptions, gguf_file: str) -> Loaded:
    """A GGUF file's own numbers and tokenizer, from the cache folder."""
    # For the families that run so, a class of their own adds nothing; to find it out, transformers reads the vocabulary
    # in a way that takes ten seconds.
    from transformers import PreTrainedTokenizerFast as Kind

    def fill(folder: Path, key: str) -> None:
        from .gguf import write_gguf_model

        _say(f"Repacking {name} in {cache_folder()} (only this once)")
        _say(f"{name}: {write_gguf_model(Path(source, gguf_file), name, folder, key)}")
        tokenizer, place = _tokenizer(source, name, gguf_file, Kind), folder / "tokenizer"
        tokenizer.hf.save_pretrained(place)
        if _facts_of(_tokenizer(str(place), name, kind=Kind)) != _facts_of(tokenizer):
            shutil.rmtree(place)  # then it is made anew each time

    key = f"{_identity(source, name, gguf_file, None)} transformers {version('transformers')}"
    folder = kept(key, name, GGUF, fill, _say)
    if (reason := slow_because()) is not None:
        _say(reason)
    model, place = QuantizedDecoder(read(folder), name, kernels=options.kernels), folder / "tokenizer"
    if not place.is_dir():
        return Loaded(model, _tokenizer(source, name, gguf_file, Kind))
    tokenizer = _tokenizer(str(place), name, kind=Kind)
    tokenizer.hf.name_or_path = name
    return Loaded(model, tokenizer)


def _facts_of(tokenizer: Tokenizer) -> tuple[Any, ...]:
    hf = tokenizer.hf
    return hf.backend_tokenizer.to_str(), hf.special_tokens_map, hf.all_special_ids, hf.chat_template


def _bare_config(folder: Path) -> dict[str, Any]:
    """What AutoTokenizer needs of a model's config. Left to read it itself, it imports what the model is made of, which
    is half of the start-up of a model that is in the cache. Nothing if it could matter which class the config has: for
    a folder that names no tokenizer class or brings code of its own."""
    from transformers import PreTrainedConfig

    try:
        config, tokenizer = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("config.json", "tokenizer_config.json")
        )
        fields = {"model_type": config["model_type"], "name_or_path": str(folder)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(tokenizer, dict) or not tokenizer.get("tokenizer_class") or "auto_map" in tokenizer:
        return {}
    return {"config": PreTrainedConfig(**fields)}


def _load_weights(source: str, name: str, options: LoadOptions, gguf_file: str | None) -> Any:
    """The Hugging Face model, on its device."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
        GgufConfig,
    )
    from transformers.utils import logging

    from .speech import FAMILIES as HEARING

    if gguf_file is not None:
        _refuse_unread_settings(Path(source, gguf_file), name)
    weights: dict[str, Any] = {} if gguf_file is None else {
        "gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}  # fmt: skip
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        kind: Any = AutoModelForCausalLM
        if gguf_file is None:
            config = AutoConfig.from_pretrained(source)
            if getattr(config, "is_encoder_decoder", False):
                kind = AutoModelForSpeechSeq2Seq if config.model_type in HEARING else AutoModelForSeq2SeqLM
            if quantised_by(config) is not None:  # such weights cannot all be moved afterwards
                weights["device_map"] = {"": str(options.torch_device)}
        with _alone(source, gguf_file) as folder:
            loaded: Any = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **weights)
    except Exception as error:  # transformers, safetensors and the hub raise a dozen unrelated kinds
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would make them up
        raise ModelError(f"model {name!r} is incomplete: {len(missing)} weights are missing, {missing[0]} for one")
    if gguf_file is not None:
        _refuse_unread_parts(Path(source, gguf_file), name, model)
    if "device_map" not in weights:
        model = model.to(options.torch_device)
    if options.adapter is not None:
        base = name.removesuffix(f"+{Path(options.adapter).name}")
        model = merged(model, options.adapter, base, labels_of(base, source, gguf_file, model))
    return model


def _refuse_unread_settings(path: Path, name: str) -> None:
    """Raises ModelError for a file of which transformers would make another model than it holds. What else is wrong
    with a file, transformers says itself."""
    from .gguf import ARCHITECTURES
    from .gguf_file import FACTORS, open_gguf, partly_rotated, scaling_of, unread_setting

    try:
        file = open_gguf(path)
    except ModelError:
        return
    if (scaling := scaling_of(file)) is not None:
        raise ModelError(f"model {name!r} cannot be used: {scaling}, which transformers does not read from such a "
                         "file; use the model's own folder")  # fmt: skip
    if FACTORS in file.tensors:
        raise ModelError(f"model {name!r} cannot be dequantised: transformers does not read {FACTORS}, the factors of "
                         "its rotations; --quantization gguf does")  # fmt: skip
    if file.architecture in ARCHITECTURES and (reason := partly_rotated(file)) is not None:
        raise ModelError(f"model {name!r} cannot be used: {reason}, and transformers turns whole ones")
    if file.architecture in ARCHITECTURES and (reason := unread_setting(file)) is not None:
        raise ModelError(f"model {name!r} cannot be used: {reason} by transformers; use the model's own folder")


def _refuse_unread_parts(path: Path, name: str, model: Any) -> None:
    """Raises ModelError for a file with tensors that transformers has stepped over, such as biases of a Llama, or with
    settings for which it took others: the model is another than the file's. Tensors only for architectures whose names
    are known here."""
    from .gguf import ARCHITECTURES, names_read
    from .gguf_file import differing_setting, open_gguf

    file = open_gguf(path)
    if (reason := differing_setting(file, model.config.get_text_config())) is not None:
        raise ModelError(f"model {name!r} cannot be used: {reason} by transformers; use the model's own folder")
    if file.architecture not in ARCHITECTURES or unsupported(model.config) is not None:
        return
    known = names_read(model)
    if unread := sorted(own for own in file.tensors if own not in known and ".attn_rot_embd." not in own):
        raise ModelError(
            f"model {name!r} cannot be dequantised: transformers does not read {len(unread)} of its tensors, "
            f"{unread[0]} for one; use the model's own folder"
        )


@contextmanager
def _alone(source: str, gguf_file: str | None) -> Iterator[str]:
    """The folder to load from: for a GGUF file one of its own, as what lies beside it may be another model's. There
    transformers draws a bar that cannot be switched off; nothing else is lost with it. What goes wrong is told of the
    file itself, and by our own reader if that sees it too: it knows what the bytes should have been."""
    if gguf_file is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="pilotfish-") as folder, redirect_stderr(io.StringIO()):
        Path(folder, gguf_file).symlink_to(Path(source, gguf_file).resolve())
        try:
            yield folder
        except Exception as error:
            from .gguf_file import open_gguf

            open_gguf(Path(source, gguf_file))
            raise ModelError(_first_line(error).replace(folder, source)) from error


def _wrap(model: Any, source: str, name: str, options: LoadOptions, gguf_file: str | None) -> CausalLM:
    """Our decoder for the families that it knows, transformers' code for all others and on demand."""
    if options.named_adapters:
        from .encdec import EncoderDecoder
        from .huggingface import HuggingFaceLM

        wrapped = beside(model, options.named_adapters, name, labels_of(name, source, gguf_file, model))
        return AdaptedLM((EncoderDecoder if model.config.is_encoder_decoder else HuggingFaceLM)(model, name), wrapped)
    if model.config.is_encoder_decoder:
        if options.model_impl == "hf":
            raise ModelError(
                f"{name} is an encoder-decoder model, whose decoder is always run by our code, not by 'hf'"
            )
        from .encdec import EncoderDecoder

        return EncoderDecoder(model, name)
    ours = options.model_impl == "native" or unsupported(model.config.get_text_config()) is None
    if options.model_impl != "hf" and ours:
        return Decoder(model, name)
    from .huggingface import HuggingFaceLM

    return HuggingFaceLM(model, name)


def _load_quantised(source: str, name: str, options: LoadOptions, gguf_file: str | None) -> CausalLM | None:
    """The quantised model, from the cache folder; None, and said so, if this model cannot be quantised."""
    try:
        quantised = stored(
            _identity(source, name, gguf_file, options.adapter),
            name,
            bits_of(options.quantization),
            lambda: _load_weights(source, name, options, gguf_file),
            _say,
        )
    except QuantisationError as error:
        _say(f"{name}: {error}; it runs as it is stored")
        return None
    if (reason := slow_because()) is not None:
        _say(reason)
    return QuantizedDecoder(quantised, name, kernels=options.kernels)


def _identity(source: str, name: str, gguf_file: str | None, adapter: str | None) -> str:
    """What tells these weights from all others."""
    if adapter is not None:
        files = [path for path in adapter_folder(adapter).iterdir() if path.is_file()]
        return f"{_identity(source, name, gguf_file, None)} with {key_of(files)}"
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
    if isinstance(error, ModelError):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
