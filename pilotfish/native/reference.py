"""What each kernel computes, in plain numpy: read this first, then the C++; the tests compare the two.

It does not know layouts. Sums of integers are exact in any order; floats agree within rounding.

Letters: R rows, K inputs, N outputs, G groups of 32 inputs, D head width.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
GROUP = 32


def quantise(x_RK: Array) -> tuple[Array, Array]:
    """Bytes [R, K] in +-127 and scales [R, G]; K is a multiple of 32. A NaN or an infinity makes bytes 0, and the scale
    one."""
    grouped = x_RK.reshape(len(x_RK), -1, GROUP).astype(np.float32)
    largest = np.abs(grouped).max(2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        usable = (largest > 0) & (largest < 3e38)
        inverse = np.where(usable, np.float32(127) / largest, np.float32(0))
        numbers = np.where(usable[..., None], np.rint(grouped * inverse[..., None]), 0)
    return numbers.astype(np.int8).reshape(x_RK.shape), largest * np.float32(1 / 127)


def product(numbers_RK: Array, scales_RG: Array, weights_NK: Array, bias_N: Array) -> Array:
    """Quantised rows times weights as they stand for (float64), [R, N]."""
    rows = numbers_RK.astype(np.float64) * np.repeat(scales_RG.astype(np.float64), GROUP, 1)
    out: Array = rows @ weights_NK.astype(np.float64).T + bias_N
    return out


def normalise(x: Array, weight: Array, epsilon: float) -> Array:
    """RMSNorm (Zhang and Sennrich 2019, equation 4)."""
    x = x.astype(np.float64)
    out: Array = x / np.sqrt((x * x).mean() + epsilon) * weight
    return out


def rotate(x_D: Array, cosines: Array, sines: Array) -> Array:
    """Rotary positions (RoFormer, section 3.2.2), the halves of a head against each other."""
    first, second = np.split(x_D.astype(np.float64), 2)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines])


def activate(gate: Array, up: Array, gelu: bool) -> Array:
    """silu(gate) * up, or with the tanh form of GELU."""
    g = gate.astype(np.float64)
    inner = 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3) if gelu else g
    out: Array = g / (1 + np.exp(-inner)) * up
    return out


def attend(query_D: Array, keys_TD: Array, values_TD: Array, scale: float) -> Array:
    """Softmax attention of one query over its own keys."""
    scores = keys_TD.astype(np.float64) @ query_D * scale
    shares = np.exp(scores - scores.max())
    out: Array = shares @ values_TD.astype(np.float64) / shares.sum()
    return out
