"""LoadOptions: how weights are loaded. Frozen; the command line is generated from the fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..errors import OptionError
from ..lazily import torch

if TYPE_CHECKING:
    from torch import device as Device

DTYPES = ("float32", "float64", "bfloat16", "float16")
QUANTIZATIONS = {"none": 0, "int8": 8, "int4": 4}


def bits_of(quantization: str) -> int:
    """8, 4, or 0 for none. Raises OptionError for another name."""
    if quantization not in QUANTIZATIONS:
        raise OptionError(f"quantization must be {', '.join(QUANTIZATIONS)}, not {quantization!r}")
    return QUANTIZATIONS[quantization]


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
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise OptionError(f"dtype must be auto, {', '.join(DTYPES)}, not {self.dtype!r}")
        self.torch_device  # noqa: B018 -- raises if there is no such device

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
