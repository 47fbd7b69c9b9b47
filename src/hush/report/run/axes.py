"""Axes of a chart: values to shares of their length, and round numbers to mark them with."""

import math
from dataclasses import dataclass

_MOST_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`, linear or logarithmic."""

    label: str
    low: float
    high: float
    log: bool = False
    percent: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"an axis from {self.low} to {self.high} has no length")

    def place(self, value: float) -> float:
        """Where a value is, as a share of the axis; values beyond its ends are at its ends."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values on the axis, and their labels."""
        return [(value, self._text(value)) for value in (self._decades() if self.log else self._round())]

    def _decades(self) -> list[float]:
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        every = -(-(last - first + 1) // _MOST_TICKS)
        return [10.0**power for power in range(last, first - 1, -every)][::-1]

    def _round(self) -> list[float]:
        rough = (self.high - self.low) / (_MOST_TICKS - 1)
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]

    def _text(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.6g}%"
        if self.log and value < 1:
            return f"1e{math.log10(value):.0f}"
        return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")
