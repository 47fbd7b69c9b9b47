"""Values as named texts that are equal only where every bit is."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hush.core.errors import HushError

Entries = dict[str, str]


def asked(name: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Entries:
    """Every number that a function gives, by its name, or the class of the error that it raises.

    The error's message is not kept: wording may change where behaviour does not.
    """
    try:
        return entries(name, function(*arguments, **settings))
    except HushError as error:
        return {name: f"refused: {type(error).__name__}"}


def entries(name: str, value: Any) -> Entries:
    """Every number of a value by its name."""
    return dict(_named(name, value))


def _named(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if hasattr(value, "to_plain"):
        value = value.to_plain()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}", item)
    elif isinstance(value, torch.Tensor | bytes):
        yield name, digest(value)
    elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _named(f"{name}[{index}]", item)
    elif isinstance(value, float | np.floating):
        yield name, float(value).hex()
    else:
        yield name, str(value)


def digest(value: torch.Tensor | bytes) -> str:
    """SHA-256 of the bytes of a tensor, with its type and shape, or of plain bytes."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    kind = f"{value.dtype} {tuple(value.shape)} "
    return digest(kind.encode() + value.detach().cpu().contiguous().numpy().tobytes())
