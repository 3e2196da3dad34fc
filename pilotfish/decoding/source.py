"""What an encoder reads before a text is written: token ids, or features such as those of a sound.

It does not know encoders, nor what the numbers mean. The one trick: features go by a digest of their bytes, so whoever
asks whether two sources are the same (a cache does) compares names and keeps no numbers for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..lazily import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Numbers that an encoder reads. values: [rows, columns], on the CPU; nobody else may write to it. digest: of
    dtype, shape and every bit, by which alone two are compared."""

    values: Tensor = field(compare=False, repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        bits = self.values.contiguous().view(torch.uint8).numpy().tobytes()
        name = f"{self.values.dtype} {tuple(self.values.shape)} "
        object.__setattr__(self, "digest", hashlib.sha256(name.encode() + bits).hexdigest())

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns


Source = tuple[int, ...] | Features  # empty for a decoder-only model


def ids_of(source: Source) -> tuple[int, ...]:
    """The tokens of a source; none of features, from which nothing can be copied."""
    return () if isinstance(source, Features) else source
