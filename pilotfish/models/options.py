"""LoadOptions: how weights are loaded. Frozen; the command line is generated from the fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import OptionError, unknown_name
from ..lazily import torch

if TYPE_CHECKING:
    from torch import device as Device

DTYPES = ("float32", "float64", "bfloat16", "float16")
QUANTIZATIONS = {"none": 0, "int8": 8, "int4": 4}  # of float weights, whatever they are
GGUF = "gguf"  # a GGUF file's own numbers
_GGUF_BITS = 9  # `products.GROUPED`; to import that here would be to import a compiler
Kernels = Literal["auto", "native", "numba"]
KERNELS: tuple[Kernels, ...] = get_args(Kernels)


def _named(one: object) -> tuple[str, str]:
    name, _, folder = str(one).partition("=")
    return name.strip(), folder.strip()


def bits_of(quantization: str) -> int:
    """8, 4, `products.GROUPED` for a GGUF file's own numbers, or 0 for none. Raises OptionError for another name."""
    if quantization == GGUF:
        return _GGUF_BITS
    if quantization not in QUANTIZATIONS:
        raise OptionError(f"quantization must be {', '.join((*QUANTIZATIONS, GGUF))}, not {quantization!r}")
    return QUANTIZATIONS[quantization]


def name_of(bits: int) -> str:
    """What `bits_of` turns into these bits."""
    return GGUF if bits == _GGUF_BITS else next(name for name, own in QUANTIZATIONS.items() if own == bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How weights are loaded. adapters: LoRA adapters that requests may ask for, as a mapping {name: folder} or texts
    NAME=FOLDER. Raises OptionError for an unknown name, or for options that contradict each other."""

    dtype: str = field(default="auto", metadata={"help": "auto (as stored), float32, bfloat16, float16 or float64"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda, cuda:1, mps, ..."})

    quantization: Literal["none", "int8", "int4", "gguf"] = field(
        default="none",
        metadata={
            "help": "none (as stored), int8, or int4: smaller and faster weights, on a CPU; gguf: a GGUF file's own "
            "numbers, not dequantised"
        },
    )
    kernels: Kernels = field(
        default="auto",
        metadata={
            "help": "what runs such weights, a draft's too: numba's loops, C++ built here (native), or C++ if "
            "possible (auto)"
        },
    )
    model_impl: Literal["auto", "hf", "native"] = field(
        default="auto", metadata={"help": "whose code runs the model: transformers' (hf), ours (native), or the faster"}
    )
    adapter: str | None = field(
        default=None, metadata={"help": "a LoRA adapter in peft's format, folder or hub id, merged into the weights"}
    )
    adapters: Any = ()  # a flag of those commands that serve several requests only

    def __post_init__(self) -> None:
        if self.kernels not in KERNELS:
            raise unknown_name("kernels", str(self.kernels), KERNELS)
        if self.model_impl not in ("auto", "hf", "native"):
            raise OptionError(f"model_impl must be auto, hf or native, not {self.model_impl!r}")
        if bits_of(self.quantization):
            if self.model_impl == "hf":
                raise OptionError(f"quantization {self.quantization!r} needs our own decoder, not model_impl 'hf'")
            if self.dtype not in ("auto", "float32"):
                raise OptionError(f"with quantization {self.quantization!r} the rest is float32, not {self.dtype}")
            if self.device not in ("auto", "cpu"):
                raise OptionError(f"quantization {self.quantization!r} is for the CPU, not for {self.device!r}")
        elif self.kernels == "native":
            raise OptionError("kernels 'native' run int8 and int4 weights, and quantization is 'none': choose one")
        self._check_adapters()
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise OptionError(f"dtype must be auto, {', '.join(DTYPES)}, not {self.dtype!r}")
        self.torch_device  # noqa: B018 -- raises if there is no such device

    @property
    def named_adapters(self) -> dict[str, str]:
        """{name: folder} of the adapters that requests may ask for."""
        given = self.adapters.items() if isinstance(self.adapters, Mapping) else map(_named, self.adapters)
        return {str(name): str(folder) for name, folder in given}

    def _check_adapters(self) -> None:
        if self.adapter is not None and (not isinstance(self.adapter, str | Path) or not str(self.adapter)):
            raise OptionError(f"adapter must name a folder, not {self.adapter!r}")
        if isinstance(self.adapters, str) or not isinstance(self.adapters, Mapping | Sequence):
            raise OptionError(f"adapters must be a mapping such as {{'law': 'FOLDER'}}, not {self.adapters!r}")
        if len(names := self.named_adapters) < len(self.adapters):
            raise OptionError(f"several adapters have one name; those given are called {', '.join(names)}")
        if self.adapter is not None and self.quantization == GGUF:
            raise OptionError(
                "an adapter is merged into float weights, and quantization 'gguf' has none: use int8 or int4"
            )
        for name, folder in names.items():
            if not name or not folder or "." in name:  # torch keeps modules by such names
                raise OptionError(f"an adapter is given as NAME=FOLDER, no dot in NAME, not as {name}={folder!r}")
        if not names:
            return
        if self.adapter is not None:
            raise OptionError("adapter is merged into the weights and adapters stay beside them: give one of the two")
        if bits_of(self.quantization):
            raise OptionError(
                f"adapters stay beside float weights, and quantization is {self.quantization!r}; merge one (adapter=)"
            )
        if self.model_impl == "native":
            raise OptionError("adapters are run by transformers' code, not by ours (model_impl); merge one (adapter=)")

    @property
    def torch_device(self) -> Device:
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(f"device {self.device!r} cannot be used: {str(error).splitlines()[0]}") from error
        return device
