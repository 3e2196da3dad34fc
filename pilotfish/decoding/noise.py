"""Noise: randomness as data, a function of (seed, position, lane) and nothing else.

It does not know what the numbers are used for. The one trick: no generator is ever advanced, so batching, preemption,
discarded draft positions and the drafter itself cannot shift a later draw. Lanes keep the draws for drafting, for
accepting and for the residual apart: sharing them biases the output, and the tests prove that it does.

A scalar is the first 53 bits of BLAKE2b(seed, position, lane, index). A vector is Philox-4x64 (a counter-based
generator: Salmon et al., SC'11) keyed the same way.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from ..lazily import np, torch

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray[Any, Any]


class Lane(IntEnum):
    """What a draw is for. Two lanes never share a number."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    RACE = 3  # coupled: target and drafters share this one on purpose


def _digest(seed: int, position: int, lane: int, index: int) -> bytes:
    key = struct.pack("<QQII", seed & 0xFFFF_FFFF_FFFF_FFFF, position, lane, index)
    return hashlib.blake2b(key, digest_size=16).digest()


def uniform(seed: int, position: int, lane: Lane, index: int = 0) -> float:
    """A number in [0, 1), a multiple of 2**-53."""
    return (int.from_bytes(_digest(seed, position, lane, index)[:8], "little") >> 11) * 2.0**-53


LEAST = 2.0**-1000  # of an exponential: 0 / 0 must not win a race


def draw_exponentials(key: int, num: int) -> Array:
    """Independent unit exponentials, float64 [num]. key: of 128 bits."""
    draws = np.random.Generator(np.random.Philox(key=key)).standard_exponential(num)
    return np.maximum(draws, LEAST, out=draws)


_draw: list[Callable[[int, int], Array]] = [draw_exponentials]


def draw_with(draw: Callable[[int, int], Array]) -> None:
    """From now on take exponentials from here: from something faster that gives the same to the last bit."""
    _draw[0] = draw


@lru_cache(maxsize=64)
def exponentials(seed: int, position: int, num_tokens: int) -> Tensor:
    """Independent unit exponentials, one per token id, float64 [V]; the first n do not depend on V. Read only."""
    return torch.from_numpy(_draw[0](int.from_bytes(_digest(seed, position, Lane.RACE, 0), "little"), num_tokens))


def fold(seed: int, choice: int) -> int:
    """The seed of the n-th choice of one request: the seed itself for the first."""
    if choice == 0:
        return seed
    return int.from_bytes(_digest(seed, choice, 0xFFFF, 0)[:8], "little")


def invert_cdf(weights_V: Tensor, u: float) -> int:
    """The id at quantile u in [0, 1) of unnormalised weights; never one whose weight is 0.

    Sums in float64. Raises an AssertionError if no weight is positive.
    """
    if weights_V.device.type == "cpu":
        cdf_V = weights_V.numpy().cumsum(dtype=np.float64)
        total = float(cdf_V[-1])
        assert 0 < total < math.inf, f"weights sum to {total}"
        index = int(cdf_V.searchsorted(u * total, side="right"))
        return index if index < len(cdf_V) else int(np.flatnonzero(weights_V.numpy())[-1])
    cdf = torch.cumsum(weights_V, 0, dtype=torch.float64)
    total = float(cdf[-1])
    assert 0 < total < math.inf, f"weights sum to {total}"
    index = int(torch.searchsorted(cdf, torch.tensor(u * total, dtype=torch.float64, device=cdf.device), right=True))
    if index == len(cdf):  # u * total rounded up to total
        index = int(torch.nonzero(weights_V)[-1])
    return index


class Noise(Protocol):
    """The choices an acceptance rule leaves to chance. Depth 0 is the first token after the pending one."""

    def accept(self, depth: int, sibling: int, probability: float) -> bool:
        """True with this probability."""

    def choose(self, depth: int, weights_V: Tensor) -> int:
        """An id drawn with these weights (not necessarily summing to 1)."""

    def race(self, depth: int, p_V: Tensor) -> int:
        """The id that wins the exponential race: argmax(p / E), the same as argmax(log p + Gumbel noise)."""


class SeededNoise:
    """Noise for one request and one pass; ``position`` is the index in the text of the token at depth 0.

    Every pass emits a token, so its position is its own, and all its coins are keyed by that: ``block`` looks at coins
    and drawn tokens beyond the last accepted one, and a later pass that met them again would be biased by what they
    said. Only the race goes by the token's own position, because there the coin *is* the token.
    """

    __slots__ = ("position", "seed")

    def __init__(self, seed: int, position: int):
        self.seed, self.position = seed, position

    def accept(self, depth: int, sibling: int, probability: float) -> bool:
        return self.coin(depth, sibling) < probability

    def choose(self, depth: int, weights_V: Tensor) -> int:
        return invert_cdf(weights_V, self.quantile(depth))

    def race(self, depth: int, p_V: Tensor) -> int:
        return race(self.seed, self.position + depth, p_V)

    def coin(self, depth: int, sibling: int) -> float:
        """The uniform that `accept` goes by."""
        return uniform(self.seed, self.position, Lane.ACCEPT, _place(depth, sibling))

    def quantile(self, depth: int) -> float:
        """The uniform that `choose` goes by."""
        return uniform(self.seed, self.position, Lane.RESIDUAL, _place(depth, 0))

    def draw(self, depth: int, q_V: Tensor, sibling: int = 0) -> int:
        """A drafter's draw from its own law: a lane of its own, so that q cannot meet the target's coins."""
        return invert_cdf(q_V, uniform(self.seed, self.position, Lane.DRAFT, _place(depth, sibling)))


def _place(depth: int, sibling: int) -> int:
    return depth << 16 | sibling


def race(seed: int, position: int, p_V: Tensor) -> int:
    """The token at this position under ``coupled``: argmax(p / E) with E shared by target and drafters, in float64.

    The Gumbel-max trick (Maddison et al., 2014): the winner has law p; two laws that share E mostly agree.
    """
    noise_V = exponentials(seed, position, len(p_V))
    if p_V.device.type == "cpu":
        return int((p_V.numpy() / noise_V.numpy()).argmax())
    return int((p_V.double() / noise_V.to(p_V.device)).argmax())
