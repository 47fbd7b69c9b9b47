"""Networks by name: two for records of any shape, and networks of other distributions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hush.core.errors import Unsupported
from hush.core.extensions import choices, extensions

HIDDEN = 32


@dataclass(frozen=True, kw_only=True)
class Network:
    """Factory of a network, and the records that it takes."""

    factory: Callable[[int, tuple[int, ...]], nn.Module]
    """Function from the number of classes and the shape of a record to a new network."""
    default_for: tuple[str, ...] = ()
    """Data sets with this network as the default."""
    features: str | None = None
    """Features of the data that it takes. None: the records as they are."""
    shape: tuple[int | None, ...] | None = None
    """Shape of a record, with None for any size. None: any shape."""
    channels: int = 1
    """Divisor of the first size."""
    tokens: bool = False
    """Whether a record is token ids, which are integers."""

    def takes(self, shape: tuple[int, ...], tokens: bool) -> bool:
        """Whether records of this shape fit, of token ids or of floating-point numbers."""
        if tokens != self.tokens:
            return False
        return self.shape is None or (
            len(shape) == len(self.shape)
            and shape[0] % self.channels == 0
            and all(size in (None, actual) for size, actual in zip(self.shape, shape, strict=True))
        )


def logistic(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Linear layer on the flattened input, initialised to zero, as the loss is convex."""
    linear = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two fully connected layers with 32 hidden units (generalized Gaussian paper, for Adult)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes)
    )


_OWN = {"logistic": Network(factory=logistic, default_for=("digits",)), "mlp": Network(factory=mlp)}


def networks() -> dict[str, Network]:
    """All networks by name; imports the modules of other distributions."""
    return _OWN | {name: point.load() for name, point in extensions("models").items()}


def default_model(data: str, features: str | None = None) -> str:
    """Name of the default network for a data set, or for features of it."""
    for wanted in (features, None):  # records without such features raise when those are computed
        for name, network in networks().items():
            if data in network.default_for and network.features == wanted:
                return name
    return "mlp"


def build(
    name: str, *, classes: int, shape: Sequence[int], dtype: torch.dtype | None = None
) -> nn.Module:
    """Build a network with one score per class; weights come from torch's global generator.

    Args:
        name: `logistic`, `mlp`, or a network of another distribution, as `hush train --help` lists them.
        classes: Number of classes.
        shape: Shape of a record.
        dtype: Type of the records. None: one that the network takes.

    >>> build("logistic", classes=10, shape=(1, 8, 8))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    point = extensions("models").get(name)
    if name not in _OWN and point is None:
        raise Unsupported(f"No network is called {name!r}. There are {choices('models', *_OWN)}")
    network: Network = _OWN[name] if point is None else point.load()
    record = tuple(shape)
    tokens = network.tokens if dtype is None else not dtype.is_floating_point
    if not network.takes(record, tokens):
        # records of unknown type fit networks of both kinds
        kinds = (tokens,) if dtype is not None else (True, False)
        fitting = [
            name for name, each in networks().items() if any(each.takes(record, k) for k in kinds)
        ]
        source = f" ({network.features} features of the data)" if network.features else ""
        raise Unsupported(
            f"{name} takes records of {_in_words(network.shape, network.tokens)}{source}, not "
            f"{_in_words(record, tokens)}. Networks that take those (--model): {', '.join(fitting)}."
        )
    return network.factory(classes, record)


def _in_words(shape: Sequence[int | None] | None, tokens: bool) -> str:
    kind = "token ids" if tokens else "numbers"
    if shape is None or shape == (None,):
        return f"{kind}, {'in any number' if shape else 'of any shape'}"
    return f"{' x '.join('any' if size is None else str(size) for size in shape) or '1'} {kind}"
