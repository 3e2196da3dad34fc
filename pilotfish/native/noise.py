"""The exponentials of `decoding.noise` from a built library: faster, and the same to the last bit.

It does not know when they are wanted. The one trick: numpy's ziggurat has tables of 53 bits, which only arithmetic of
more bits than that can make again; `decimal` does it once. Whatever should still differ, in a coming numpy or in
another mathematical library, is found out before anybody relies on it.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np

from ..decoding import noise
from .library import Array, Library

_LAYERS = 256
_TAIL = Decimal("7.6971174701310497140446280481")  # where the lowest layer's rectangle ends
_TABLE = np.dtype([("below", "u8", _LAYERS), ("width", "f8", _LAYERS), ("height", "f8", _LAYERS), ("tail", "f8")])
_TRIED = 20_000  # draws: some 200 of them from the ziggurat's edges, a few from its tail


def exponentials_of(native: Library) -> Callable[[int, int], Array] | None:
    """What to draw with instead of `noise.draw_exponentials`; None if the two do not agree here."""
    table = ziggurat()

    def draw(key: int, num: int) -> Array:
        out = np.empty(num)
        low, high = key & 0xFFFF_FFFF_FFFF_FFFF, key >> 64
        native.exponentials(table.ctypes.data, low, high, num, noise.LEAST, out.ctypes.data)
        return out

    return draw if np.array_equal(draw(1, _TRIED), noise.draw_exponentials(1, _TRIED)) else None


def ziggurat() -> Array:
    """The tables of noise.h: layers of equal area under exp(-x), Marsaglia and Tsang 2000, section 3.2."""
    table = np.zeros(1, _TABLE)
    below, width, height = (table[name][0] for name in ("below", "width", "height"))
    with localcontext() as context:
        context.prec = 40
        steps, edge = Decimal(2**53), _TAIL
        area, base = (edge + 1) * (-edge).exp(), edge + 1
        below[0], below[1] = int(edge / base * steps), 0
        width[0], width[-1] = float(base / steps), float(edge / steps)
        height[0], height[-1] = 1.0, float((-edge).exp())
        for layer in range(_LAYERS - 2, 0, -1):
            last, edge = edge, -(area / edge + (-edge).exp()).ln()
            below[layer + 1] = int(edge / last * steps)
            width[layer], height[layer] = float(edge / steps), float((-edge).exp())
    table["tail"] = float(_TAIL)
    return table
