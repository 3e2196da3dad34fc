"""What both kinds of heads are made of: a draft vocabulary, and products that can be packed into bytes.

It does not know which head. The one trick: a reduced vocabulary is a list of the target's ids, ascending, and the maps
that the file formats want (`d2t`, `t2d`) follow from it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DraftError
from ..models.base import ModelInfo
from ..models.linear import PackedLinear
from ..models.options import QUANTIZATIONS, Kernels


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class PackedProduct(nn.Module):
    """A linear layer whose weights are bytes (see `pilotfish.models.linear`), for drafting on a CPU."""

    def __init__(self, linear: nn.Linear, bits: int, kernels: Kernels = "auto"):
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.product = PackedLinear(linear.weight.detach(), bits, bias, kernels=kernels)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.product(x_TD)


def placed(head: nn.Module, quantization: str, target: ModelInfo) -> None:
    """Bring a head to where its target is, its linear layers packed and run by the target's kernels. quantization: auto
    is int8 on a CPU, else none.

    Raises DraftError for bytes on another device than a CPU.
    """
    device, on_cpu = target.device, target.device.type == "cpu"
    chosen = ("int8" if on_cpu else "none") if quantization == "auto" else quantization
    if QUANTIZATIONS[chosen]:
        if not on_cpu:
            raise DraftError(f"quantization {chosen!r} of a head is for the CPU, not for {device}")
        packed(head, QUANTIZATIONS[chosen], target.kernels)
    head.to(device).requires_grad_(False)


def packed(module: nn.Module, bits: int, kernels: Kernels = "auto") -> None:
    """Replace every linear layer inside a module by one of ``bits`` bits, for drafting only."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedProduct(child, bits, kernels))
        else:
            packed(child, bits, kernels)


def offsets_of(ids: Sequence[int]) -> Tensor:
    """`d2t`, as in `speculators` and EAGLE: draft id i stands for the target's id i + d2t[i]. int64."""
    ids_N = torch.tensor(ids, dtype=torch.int64)
    assert len(ids) and bool((ids_N[1:] > ids_N[:-1]).all()), "the target's ids, ascending"
    return ids_N - torch.arange(len(ids))


def members_of(ids_N: Tensor, num_ids: int) -> Tensor:
    """`t2d`: bool over the target's ids, whether a draft id stands for it."""
    found_V = torch.zeros(num_ids, dtype=torch.bool)
    found_V[ids_N] = True
    return found_V
