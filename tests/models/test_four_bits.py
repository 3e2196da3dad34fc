"""Groups of weights as 16 levels: what is already rounded comes back exactly, all else with little error."""

import gguf
import numpy as np
import pytest
import torch

from pilotfish.errors import ModelError
from pilotfish.models.four_bits import LARGEST, TOP, fit
from pilotfish.models.linear import pack, unpack
from pilotfish.models.products import GROUP


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def halves(num: int, low: float, high: float, seed: int) -> torch.Tensor:
    """Numbers that a float16 holds, in float32, [num, 1]."""
    return (low + (high - low) * torch.rand(num, 1, generator=generator(seed))).half().float()


def back(groups: torch.Tensor) -> torch.Tensor:
    numbers, scales, minimums = fit(groups)
    assert numbers.dtype == torch.uint8 and int(numbers.max()) <= TOP
    assert scales.dtype == minimums.dtype == torch.float16
    return numbers.float() * scales.float()[:, None] + minimums.float()[:, None]


def drawn(num: int, levels: int = TOP + 1, first: int = 0) -> torch.Tensor:
    """Numbers of groups that need not use the lowest or the highest one."""
    return torch.randint(first, first + levels, (num, GROUP), generator=generator()).float()


@pytest.mark.parametrize(("levels", "first"), [(16, 0), (10, 0), (10, 6), (5, 3), (2, 13), (1, 7)])
def test_groups_that_were_rounded_already_come_back_exactly(levels: int, first: int) -> None:
    numbers, scales = drawn(500, levels, first), halves(500, 0.001, 0.1, 1)
    q4_1 = numbers * scales + halves(500, -1, -0.1, 2)
    if levels > 1:  # a group all equal has one float16 for all of them
        assert torch.equal(back(q4_1), q4_1)
    q4_0 = (numbers - 8) * scales
    for groups in (q4_0, -q4_0) if levels > 1 else ():
        assert torch.equal(back(groups), groups)
    assert torch.allclose(back(q4_1), q4_1, rtol=2**-11, atol=0)
    # The negative control: a little beside the levels, and it cannot come back.
    noisy = q4_1 + 0.02 * scales * torch.randn(500, GROUP, generator=generator(3))
    assert float((back(noisy) == noisy).float().mean()) < 0.2


def test_only_every_other_level_is_used() -> None:
    groups = (2 * drawn(200, 8) + 1) * halves(200, 0.001, 0.1, 1) + halves(200, -1, 1, 2)
    assert torch.equal(back(groups), groups)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1])
def test_a_matrix_of_a_gguf_file_comes_back_exactly(kind: gguf.GGMLQuantizationType) -> None:
    weight = np.random.default_rng(0).normal(size=(50, 256)).astype(np.float32) * np.float32(0.03)
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    packed = pack(torch.from_numpy(rounded), 4)
    assert np.array_equal(unpack(packed).numpy(), rounded)
    assert packed.weights.nbytes + packed.scales.nbytes == 64 * 256 * 5 // 8  # 5 bits a weight, and whole tiles


def test_rounded_by_others_to_fewer_bits_still_finds_the_levels() -> None:
    groups = (drawn(500) - 8) * halves(500, 0.001, 0.1, 1)
    blurred = groups.bfloat16().float()
    assert float((back(blurred) - groups).norm() / groups.norm()) < 0.003


def test_better_than_from_the_lowest_to_the_highest() -> None:
    groups = torch.randn(1000, GROUP, generator=generator())
    low, high = groups.aminmax(dim=1, keepdim=True)
    plain = ((groups - low) / (high - low) * TOP).round() * (high - low) / TOP + low
    assert float((back(groups) - groups).norm()) < 0.95 * float((plain - groups).norm())


def test_each_group_by_itself() -> None:
    groups = torch.randn(40, GROUP, generator=generator()) * torch.logspace(-4, 4, 40)[:, None]
    together = back(groups)
    assert torch.equal(back(groups[7:9]), together[7:9])


def test_ends_of_float16() -> None:
    largest = torch.linspace(-LARGEST, LARGEST, GROUP)[None]
    assert float((back(largest) - largest).abs().max()) < 0.6 * 2 * LARGEST / TOP
    tiny = 1e-6 * torch.randn(4, GROUP, generator=generator())
    assert float((back(tiny) - tiny).abs().max()) < 1e-6
    assert not back(torch.zeros(2, GROUP)).any()


def test_a_matrix_that_float16_cannot_hold_is_named() -> None:
    weight = torch.randn(16, 64, generator=generator())
    weight[3, 40] = -70000.0
    with pytest.raises(ModelError, match="2.qkv cannot be quantised to int4: it holds 70000, .* use int8"):
        pack(weight, 4, name="2.qkv")
    pack(weight, 8, name="2.qkv")
    weight[3, 40] = float("nan")
    with pytest.raises(ModelError, match="2.qkv cannot be quantised: it holds a NaN or an infinity"):
        pack(weight, 4, name="2.qkv")


def test_what_fills_the_last_group_up_does_not_widen_it() -> None:
    weight = 5 + torch.rand(16, 40, generator=generator())  # zeros would make the range six times as wide
    assert float((unpack(pack(weight, 4)) - weight).abs().max()) < 0.6 / TOP
