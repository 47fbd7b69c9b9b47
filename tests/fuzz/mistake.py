"""Something that must be refused, and what the error must name."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Attempt = Callable[[], object]


@dataclass(frozen=True)
class Mistake:
    """Something that must be refused."""

    what: str
    attempt: Attempt
    named: str
    """What the message must hold."""


NUMBERS: list[Any] = [-1, -1e-300, 0, math.nan, math.inf, -math.inf, 1e300, 10**400, -(10**400)]
STRANGE: list[Any] = [
    *("1", "", b"1", None, [], [1.0], {}, (1, 2, 3), True, 1j, int, object(), range(3)),
    *(np.array([1.0, 2.0]), np.complex128(1j), np.float64("nan"), torch.tensor([1.0, 2.0])),
    *(torch.tensor(1j), torch.tensor(math.nan), nn.Linear(1, 1), lambda: 1, {"kind": "Poisson"}),
]
WRONG = [*NUMBERS, *STRANGE]


def charges(folder: Path) -> list[str]:
    """The charges in all ledgers below a folder."""
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if line.startswith(json.dumps({"charge": ""})[:10])]
