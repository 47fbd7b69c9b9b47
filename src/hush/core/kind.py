"""Values of the right kind: what is no plan, budget or model is refused by name."""

import os
from pathlib import Path
from typing import TypeVar

from hush.core.errors import InvalidValue, short_repr

T = TypeVar("T")
_MADE = {
    "Plan": "hush.Plan(sampling=..., clipping=..., noise=...)",
    "Budget": "hush.Budget(epsilon=3.0, delta=1e-5)",
    "Sampling": "hush.Coordinate(rate=0.5)",
    "Noise": "hush.Gaussian(multiplier=1.0)",
    "Ledger": "hush.Ledger()",
    "Module": "torch.nn.Linear(64, 10)",
    "Optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "Generator": "torch.Generator()",
    "Tensor": "torch.zeros(3)",
    "dict": "what state_dict() gave",
    "str": "a string",
    "bool": "True",
}


def with_article(name: str) -> str:
    """A class's name after "a" or "an", by how it is spoken: an LSTM, an Embedding, a Linear."""
    spelled = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"{'an' if spelled or name[:1] in 'AEIOaeio' else 'a'} {name}"


def check_kind(name: str, value: object, kind: type[T]) -> T:
    """Return `value` if it is a `kind`; else raise an error that says what would be one."""
    if not isinstance(value, kind):
        # a value of some size may be records
        shown = short_repr(value) if isinstance(value, str | float | int | None) else "..."
        raise InvalidValue(
            f"{name}={shown} must be {with_article(kind.__name__)}, not "
            f"{with_article(type(value).__name__)}. "
            f"Pass e.g. {_MADE[kind.__name__]}.",
            key=name,
        )
    return value


def as_path(name: str, value: object) -> Path:
    """Return `value` as a path, or raise an error that says what would be one."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidValue(
            f"{name}={short_repr(value)} must be the name of a file or folder. "
            f'Pass e.g. {name}="runs/first".',
            key=name,
        )
    return Path(value)
