"""Named networks: small networks, and networks of other installed packages."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from hush.core.errors import Unsupported
from hush.core.extensions import choices, extensions
from hush.core.value import with_article

HIDDEN = 32


@dataclass(frozen=True, kw_only=True)
class Network:
    """Factory of a network, and the inputs that it supports."""

    factory: Callable[[int, tuple[int, ...]], nn.Module]
    """Function from the number of classes and the shape of a record to a new network."""
    default_for: tuple[str, ...] = ()
    """Data sets for which this network is the default."""
    features: str | None = None
    """Features that the network needs; None for unchanged records."""
    shape: tuple[int | None, ...] | None = None
    """Input shape, with None for a dimension of any size; None for any shape."""
    channels: int = 1
    """The size of the first dimension must be a multiple of this."""
    tokens: bool = False
    """Whether inputs are token ids (integers)."""

    def takes(self, shape: tuple[int, ...], tokens: bool) -> bool:
        """Whether the network supports inputs of this shape and kind (token ids or numbers)."""
        if tokens != self.tokens:
            return False
        return self.shape is None or (
            len(shape) == len(self.shape)
            and shape[0] % self.channels == 0
            and all(size in (None, actual) for size, actual in zip(self.shape, shape, strict=True))
        )


def logistic(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Linear layer on the flattened input, initialised to zero because the loss is convex."""
    linear = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two fully connected layers, 32 hidden units (for Adult in the generalized Gaussian paper)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes)
    )


def cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two convolutions of stride 2 with 16 and 32 channels and tanh activations, and a linear layer."""
    channels, height, width = shape
    pixels = -(-height // 4) * -(-width // 4)
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(32 * pixels, classes)),
    )


_OWN = {
    "logistic": Network(factory=logistic, default_for=("digits",)),
    "mlp": Network(factory=mlp),
    "linear": Network(factory=logistic),
    "cnn": Network(factory=cnn, shape=(None, None, None), channels=1),
}


def networks() -> dict[str, Network]:
    """All networks by name; imports the modules of other packages."""
    return _OWN | {name: point.load() for name, point in extensions("models").items()}


def default_model(data: str, features: str | None = None) -> str:
    """Name of the default network for a data set or its features."""
    for wanted in (features, None):  # computing unavailable features raises later
        for name, network in networks().items():
            if data in network.default_for and network.features == wanted:
                return name
    return "mlp"


def build(
    name: str, *, classes: int, shape: Sequence[int], dtype: torch.dtype | None = None
) -> nn.Module:
    """Build a network with one score per class; weights are drawn from torch's global generator.

    Args:
        name: `logistic` or `linear`, `mlp`, `cnn`, a network of another package, or `module:function`
            for a function of `classes` and `shape`. `hush train --help` lists the names.
        classes: Number of classes.
        shape: Shape of a record.
        dtype: Dtype of the inputs; by default a dtype that the network supports.

    >>> build("logistic", classes=10, shape=(1, 8, 8))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    network, record = network_of(name), tuple(shape)
    tokens = network.tokens if dtype is None else not dtype.is_floating_point
    if not network.takes(record, tokens):
        # inputs of unknown dtype fit networks for numbers and for token ids
        kinds = (tokens,) if dtype is not None else (True, False)
        fitting = [
            name for name, each in networks().items() if any(each.takes(record, k) for k in kinds)
        ]
        source = f" ({network.features} features of the data)" if network.features else ""
        raise Unsupported(
            f"{name} needs inputs of {_in_words(network.shape, network.tokens)}{source}, not "
            f"{_in_words(record, tokens)}. Networks for these inputs (--model): {', '.join(fitting)}."
        )
    built = network.factory(classes, record)
    if not isinstance(built, nn.Module):
        text = f"{name} returned {with_article(type(built).__name__)} instead of a torch.nn.Module."
        raise Unsupported(f"{text} Return a network for (classes, shape).")
    return built


def network_of(name: str) -> Network:
    """Network of this name, or imported from `module:function`."""
    module, separator, function = name.partition(":")
    if not separator:
        point = extensions("models").get(name)
        if name not in _OWN and point is None:
            raise Unsupported(f"No network is called {name!r}. There are {choices('models', *_OWN)}")
        return _OWN[name] if point is None else point.load()
    sys.path.insert(0, "")  # commands do not search the working directory by default
    try:
        factory = getattr(import_module(module), function)
    except Exception as error:
        raise Unsupported(
            f"--model {name} cannot be imported ({type(error).__name__}: {error}). Pass module:function,"
            " e.g. --model mymodels:build for build(classes, shape) in mymodels.py in this folder."
        ) from error
    finally:
        sys.path.remove("")
    return Network(factory=factory)


def _in_words(shape: Sequence[int | None] | None, tokens: bool) -> str:
    kind = "token ids" if tokens else "numbers"
    if shape is None or shape == (None,):
        return f"{kind}, {'in any number' if shape else 'of any shape'}"
    return f"{' x '.join('any' if size is None else str(size) for size in shape) or '1'} {kind}"
