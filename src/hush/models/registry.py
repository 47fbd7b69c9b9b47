"""Networks by name, with the data sets they are made for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hush.core.errors import Unsupported
from hush.core.value import check_count
from hush.data import efficientnet
from hush.data.scattering import CHANNELS
from hush.models.networks import (
    cifar_cnn,
    imdb_lstm,
    imdb_plain_lstm,
    logistic,
    mlp,
    mnist_cnn,
    scattering_cifar,
    scattering_linear,
    scattering_mnist,
)
from hush.models.residual import resnet22, wrn_10_2

_TABLES_AND_IMAGES = ("digits", "mnist", "fashion-mnist", "cifar10", "adult")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Factory of a network, and the inputs it takes."""

    factory: Callable[[int, tuple[int, ...]], nn.Module]
    data: tuple[str, ...]
    shape: tuple[int | None, ...] | None = None
    """The inputs it takes: None is any size, or, for the whole, any shape."""
    features: str | None = None
    """The features of the data that it takes; None: the records as they are."""
    channels: int = 1
    """The first size is a multiple of this."""
    tokens: bool = False
    """Whether a record is token ids, which are integers."""

    def takes(self, shape: tuple[int, ...], tokens: bool) -> bool:
        """Whether records of this shape, of token ids or of floating-point numbers, fit."""
        if tokens != self.tokens:
            return False
        return self.shape is None or (
            len(shape) == len(self.shape)
            and shape[0] % self.channels == 0
            and all(size in (None, actual) for size, actual in zip(self.shape, shape, strict=True))
        )


_NETWORKS = {
    "logistic": Network(factory=logistic, data=_TABLES_AND_IMAGES),
    "mlp": Network(factory=mlp, data=_TABLES_AND_IMAGES),
    "mnist-cnn": Network(factory=mnist_cnn, data=("mnist", "fashion-mnist"), shape=(1, 28, 28)),
    "cifar-cnn": Network(factory=cifar_cnn, data=("cifar10",), shape=(3, 32, 32)),
    "resnet22": Network(factory=resnet22, data=("cifar10",), shape=(3, 32, 32)),
    "wrn-10-2": Network(factory=wrn_10_2, data=("cifar10",), shape=(3, 32, 32)),
    "imdb-plain-lstm": Network(factory=imdb_plain_lstm, data=("imdb",), shape=(None,), tokens=True),
    "imdb-lstm": Network(factory=imdb_lstm, data=("imdb",), shape=(None,), tokens=True),
    "scattering-linear": Network(
        factory=scattering_linear,
        data=("digits", "mnist", "fashion-mnist", "cifar10"),
        shape=(None, None, None),
        features="scattering",
        channels=CHANNELS,
    ),
    "scattering-mnist": Network(
        factory=scattering_mnist,
        data=("mnist", "fashion-mnist"),
        shape=(81, 7, 7),
        features="scattering",
    ),
    "scattering-cifar": Network(
        factory=scattering_cifar, data=("cifar10",), shape=(243, 8, 8), features="scattering"
    ),
    "efficientnet-linear": Network(
        factory=logistic,
        data=("digits", "mnist", "fashion-mnist", "cifar10"),
        shape=(efficientnet.FEATURES,),
        features=efficientnet.NAME,
    ),
}

NAMES: tuple[str, ...] = tuple(_NETWORKS)


def models_for(data: str, features: str | None = None) -> tuple[str, ...]:
    """Names of the networks made for a data set, or for features of it.

    Args:
        data: one of `hush.data.NAMES`.
        features: one of `hush.data.features.FEATURES`; None: the records as they are.
    """
    return tuple(
        name
        for name, network in _NETWORKS.items()
        if data in network.data and features == network.features
    )


def build(
    name: str, *, classes: int, shape: Sequence[int], dtype: torch.dtype | None = None
) -> nn.Module:
    """A new network with one score a class.

    Initial weights come from torch's global generator; call `torch.manual_seed` before, to repeat
    them. They do not depend on the data.

    Args:
        name: one of `hush.models.NAMES`.
        classes: number of classes.
        shape: of one record's input.
        dtype: of the inputs; None: one that the network takes.

    >>> build("logistic", classes=10, shape=(1, 8, 8))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    if name not in _NETWORKS:
        raise Unsupported(f"there is no network called {name!r}; there are {', '.join(NAMES)}.")
    check_count("classes", classes, "a network that tells classes apart needs two", at_least=2)
    network = _NETWORKS[name]
    record = tuple(shape)
    tokens = network.tokens if dtype is None else not dtype.is_floating_point
    if not network.takes(record, tokens):
        # of records whose type is not known, both kinds of networks may be meant
        kinds = {tokens} if dtype is not None else {True, False}
        fitting = [
            name
            for name, candidate in _NETWORKS.items()
            if any(candidate.takes(record, kind) for kind in kinds)
        ]
        source = f" ({network.features} features of the data)" if network.features else ""
        raise Unsupported(
            f"{name} takes records of {_written(network.shape, network.tokens)}{source}, not "
            f"{_written(record, tokens)}. Networks that take those (--model): {', '.join(fitting)}."
        )
    return network.factory(classes, record)


def _written(shape: Sequence[int | None] | None, tokens: bool) -> str:
    """The shape and kind of a record, in words."""
    kind = "token ids" if tokens else "numbers"
    if shape is None or shape == (None,):
        return f"{kind}, {'in any number' if shape else 'of any shape'}"
    sizes = " x ".join("any" if size is None else str(size) for size in shape)
    return f"{sizes} {kind}" if sizes else "a single number"
