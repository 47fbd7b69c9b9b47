"""A stand-in for data frames: columns by name."""

from typing import Any

import numpy as np


class Frame:
    """The few things of a data frame that estimators ask for."""

    def __init__(self, **columns: Any) -> None:
        self._columns = {name: np.asarray(values) for name, values in columns.items()}

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]
