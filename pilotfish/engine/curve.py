"""Costs: seconds of a pass by its number of rows (`CostCurve`), of a draft by its length (`DraftCosts`). No clock.

It does not know what is timed. The one trick is that noise only ever adds: a pass over more rows was never cheaper than
one over fewer, so the fastest time seen for *any* larger number bounds a smaller one's, and one bad measurement among
several does no harm. What slows all passes alike (another process, a longer text) is kept apart as one factor, for
choices depend on ratios.
"""

from collections.abc import Mapping

NUM_ROWS = 64  # entries; beyond them the curve goes on as its last part
_DRIFT = 0.1  # weight of a new measurement in the factor
_STEP = 0.02  # in an entry, relative to the factor
_ODD = 2.0  # a measurement is believed up to this factor
_MEMORY = 0.95  # of a draft's measurements, per new one


class CostCurve:
    """points: {rows: seconds}, straight lines between them; may be empty: then the first measurement sets the scale."""

    def __init__(self, points: Mapping[int, float] | None = None):
        self.drift = 1.0
        self.points = dict(points or {})
        self._table = _interpolated(self.points) if self.points else []

    def seconds(self, num_rows: int) -> float:
        """Of a pass over this many rows, at the machine's present pace; 0 while nothing is known."""
        if not self._table or num_rows <= 0:
            return 0.0
        if num_rows < len(self._table):
            return self._table[num_rows] * self.drift
        half = NUM_ROWS // 2
        slope = (self._table[NUM_ROWS] - self._table[half]) / (NUM_ROWS - half)
        return (self._table[NUM_ROWS] + slope * (num_rows - NUM_ROWS)) * self.drift

    def observe(self, num_rows: int, seconds: float) -> None:
        """Blend in a measurement."""
        if num_rows <= 0 or num_rows > NUM_ROWS or seconds <= 0:
            return  # a prompt
        if not self._table:
            self._table = _interpolated({num_rows: seconds})
            return
        ratio = seconds / self._table[num_rows]
        believed = min(max(ratio / self.drift, 1 / _ODD), _ODD)
        self.drift += _DRIFT * (believed - 1) * self.drift
        self._move(num_rows, 1 + _STEP * (min(max(ratio / self.drift, 1 / _ODD), _ODD) - 1))

    def _move(self, num_rows: int, factor: float) -> None:
        table = self._table
        value = table[num_rows] = table[num_rows] * factor
        for row in range(num_rows - 1, 0, -1):
            if table[row] <= value:
                break
            table[row] = value
        for row in range(num_rows + 1, len(table)):
            if table[row] >= value:
                break
            table[row] = value


def _interpolated(points: Mapping[int, float]) -> list[float]:
    """A table from 0 to NUM_ROWS, never falling."""
    rows = sorted(points)
    least: dict[int, float] = {}
    bound = float("inf")
    for row in reversed(rows):
        bound = least[row] = min(bound, points[row])
    table = [0.0] * (NUM_ROWS + 1)
    for row in range(1, NUM_ROWS + 1):
        left = max((r for r in rows if r <= row), default=None)
        right = min((r for r in rows if r >= row), default=None)
        if left is None:  # between a cost that does not depend on the number and one that is proportional
            table[row] = least[rows[0]] * (1 + row / rows[0]) / 2
        elif right is None:
            before = rows[-2] if len(rows) > 1 else 0
            slope = (least[left] - least.get(before, 0.0)) / (left - before)
            table[row] = least[left] + slope * (row - left)
        elif left == right:
            table[row] = least[row]
        else:
            table[row] = least[left] + (least[right] - least[left]) * (row - left) / (right - left)
    return table


class DraftCosts:
    """A line through a drafter's measured calls, fading: ``base + slope * length``.

    Where all calls had one length, it goes through zero: a drafter that makes a pass per token is the usual one.
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def seconds(self, length: int) -> float:
        """Of a call whose longest draft has this length; 0 for none, and while nothing is known."""
        if length <= 0 or not self._weight:
            return 0.0
        base, slope = self._line()
        return base + slope * length

    @property
    def mean(self) -> float:
        """Of a call of any length; 0 while nothing is known."""
        return self._t / self._weight if self._weight else 0.0

    @property
    def slope(self) -> float:
        """Of one more in length; 0 while nothing is known."""
        return self._line()[1] if self._weight else 0.0

    def observe(self, length: int, seconds: float) -> None:
        """Take in a measurement."""
        if length <= 0 or seconds <= 0:
            return
        if self._weight > 1:
            known = self.seconds(length)
            seconds = min(max(seconds, known / _ODD), known * _ODD)
        self._weight = self._weight * _MEMORY + 1.0
        self._n = self._n * _MEMORY + length
        self._nn = self._nn * _MEMORY + length**2
        self._t = self._t * _MEMORY + seconds
        self._nt = self._nt * _MEMORY + length * seconds

    def _line(self) -> tuple[float, float]:
        """Least squares, the base drawn to zero as by one measurement; neither is ever negative."""
        weight = self._weight + 1.0
        base = (self._t * self._nn - self._n * self._nt) / (weight * self._nn - self._n**2)
        base = min(max(base, 0.0), self._t / self._weight)
        slope = (self._nt - base * self._n) / self._nn
        return (base, slope) if slope > 0 else (self._t / self._weight, 0.0)
