"""Images: one linear layer on fixed features in a public basis, whitened twice.

First by the covariance of images that are drawn by a formula, which costs nothing; then, in the leading
directions, by the records' own noisy covariance (docs/guarantees/baselines.md, 1). Then products of the
leading inputs may be put beside them. Records have length 1 after each, so that every norm is public.
The weights that are scored are the mean of the last ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.data import tensors
from hush_recipes.data.scattering import CHANNELS
from hush_recipes.dpsur.inputs import Inputs
from hush_recipes.figure import Figure
from hush_recipes.records.basis import Features, in_parts, public_inputs, unit
from hush_recipes.records.descent import Descent
from hush_recipes.records.extraction import FEATURE_MAPS, FeatureMap, drawn_features, features_of
from hush_recipes.records.protocol import (
    Job,
    Outcome,
    final,
    search,
    with_held_out,
    with_settings,
)
from hush_recipes.registry import variant
from hush_recipes.selection import select
from hush_recipes.statistics.moments import NoisyWhitening

HELD_OUT = {"fashion-mnist": 10_000, "mnist": 10_000, "cifar10": 5000}


@dataclass(frozen=True, kw_only=True)
class Settings(Descent):
    """Settings of a run."""

    features: tuple[Features, ...] = (Features(),)
    """Of each of the data set's feature maps, or of the first few."""
    whitened: int = 400
    """Leading channels that are whitened by paid statistics."""
    multiplier: float = 16.0
    """Noise of their mean and of their covariance."""
    multiplied: int = 0
    """Leading inputs, whitened, whose products (quadratic features) are put beside them."""
    share: float = 0.2
    """Of the products in the squared length of a record."""
    bias: bool = False
    """Inputs have length 1, so that a bias would have half of each clipped gradient's squared norm."""


def run(job: Job[Settings]) -> Outcome:
    """Accuracy of one training run, whose statistics and steps are on one ledger."""
    settings, ledger = job.settings, Ledger()
    public = _inputs(job.data, job.held_out, settings.features, job.device)
    inputs = with_products(whitened(public, settings, ledger, job.seed), settings)
    numbers = inputs.train[0][0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(numbers, inputs.classes, bias=settings.bias))
    model.to(job.device)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return settings.train(model, inputs, job.epsilon, ledger, job.seed)


@lru_cache(maxsize=1)
def _inputs(data: str, held_out: int, features: tuple[Features, ...], device: str) -> Inputs:
    """The data set's inputs on the device, kept from run to run: no run changes them."""
    parts = [
        _in_basis(extracted, held_out, own, device)
        for extracted, own in zip(FEATURE_MAPS[data][: len(features)], features, strict=True)
    ]
    return replace(
        parts[0],
        train=(side_by_side([part.train[0] for part in parts]), parts[0].train[1]),
        test=(side_by_side([part.test[0] for part in parts]), parts[0].test[1]),
    )


def _in_basis(extracted: FeatureMap, held_out: int, features: Features, device: str) -> Inputs:
    """The inputs that one feature map gives."""
    dataset = with_held_out(features_of(extracted, device), held_out)
    x, y, x_test, y_test = (part.to(device) for part in tensors(dataset))
    drawn = drawn_features(extracted, device) if features.directions else None
    x, x_test = public_inputs([x, x_test], drawn, features)
    return Inputs(classes=dataset.classes, train=(x, y), test=(x_test, y_test))


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Inputs of length 1 as one of length 1, whose leading channels are the leading ones of each."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part / len(parts) ** 0.5 for part in parts], 2).flatten(1, 2)


def whitened(inputs: Inputs, settings: Settings, ledger: Ledger, seed: int) -> Inputs:
    """The inputs, of length 1, with their leading channels whitened by statistics charged to `ledger`.

    The directions that noise hides keep their scale, beside the channels that are left as they are.
    """
    x = inputs.train[0]
    leading = settings.whitened
    # of records of length 1: the norm of a mean of outer products is at most its trace
    noisy = NoisyWhitening(multiplier=settings.multiplier, norm=1.0, square_norm=1 / x.shape[2])
    # a source of its own: this noise is drawn on the CPU
    source = torch.Generator().manual_seed(2**32 - 1 - seed)
    layer = noisy(x[:, :leading], ledger, generator=source).to(x.device)
    layer.matrix /= torch.linalg.matrix_norm(layer.matrix, 2)

    def whiten(part: Tensor) -> Tensor:
        return unit(torch.cat([layer(part[:, :leading]), part[:, leading:]], 1))

    (x, y), (x_test, y_test) = inputs.train, inputs.test
    return replace(inputs, train=(in_parts(whiten, x), y), test=(in_parts(whiten, x_test), y_test))


def with_products(inputs: Inputs, settings: Settings) -> Inputs:
    """The inputs beside products of the leading ones, each record's by itself, of length 1 again."""
    if not settings.multiplied:
        return inputs
    first, second = torch.triu_indices(settings.multiplied, settings.multiplied)
    scale, product_scale = (1 - settings.share) ** 0.5, settings.share**0.5

    def widen(part: Tensor) -> Tensor:
        leading = unit(part[:, : settings.multiplied])
        products = unit(leading[:, first] * leading[:, second])
        return torch.cat([scale * part, product_scale * products], 1)

    (x, y), (x_test, y_test) = inputs.train, inputs.test
    return replace(inputs, train=(in_parts(widen, x), y), test=(in_parts(widen, x_test), y_test))


_CLOTHES = Settings(features=(Features(), Features(power=0.5)), steps=150, rate=100.0, bias=True)
_DIGITS = (Features(power=0.5, between=0.25),)
_PHOTOGRAPHS = Settings(
    features=(Features(power=0.5, exponent=0.5, floor=1e-4), Features()),
    multiplied=100,
    steps=150,
    rate=100.0,
)
_ALL = 50_000


def _with(settings: Settings, **changes: Any) -> Settings:
    """The settings with other features."""
    return replace(settings, features=tuple(replace(own, **changes) for own in settings.features))


CHOSEN = {
    "fashion-mnist": {1.0: _CLOTHES, 3.0: replace(_CLOTHES, rate=225.0, steps=300)},
    "mnist": {
        1.0: Settings(features=_DIGITS, rate=53.0, bias=True),
        3.0: Settings(features=_DIGITS, rate=133.0, bias=True),
    },
    "cifar10": {
        1.0: _PHOTOGRAPHS,
        3.0: replace(_PHOTOGRAPHS, rate=400.0, steps=100, batch=_ALL),
        8.0: replace(_PHOTOGRAPHS, rate=900.0, steps=100, batch=_ALL),
    },
}
_NAME = "linear, drawn basis, whitened"


def _candidates(data: str, chosen: Settings) -> dict[str, Settings]:
    """The chosen settings, and others that differ from them in one part."""
    first = replace(chosen, features=chosen.features[:1])
    others = {  # those of the same features first: inputs are kept from one run to the next
        "100 channels whitened": replace(chosen, whitened=100),
        "last weights": replace(chosen, tail=0.0),
        "clip 1": replace(chosen, clip=1.0, rate=chosen.rate / 10),
        "no bias" if chosen.bias else "with a bias": replace(
            chosen, bias=not chosen.bias, rate=chosen.rate * (0.5 if chosen.bias else 2) ** 0.5
        ),
        "batches of 8,192": replace(chosen, batch=8192),
        "rate x 2/3": replace(chosen, rate=chosen.rate * 2 / 3),
        "rate x 3/2": replace(chosen, rate=chosen.rate * 3 / 2),
        "no products": replace(chosen, multiplied=0),
        "twice the steps, half the rate": replace(chosen, steps=2 * chosen.steps, rate=chosen.rate / 2),
        "power 0.25": _with(chosen, power=0.25),
        "power 0.5": _with(chosen, power=0.5),
        "power 1": _with(chosen, power=1.0),
        "basis of all drawn images": _with(chosen, between=1.0),
        "basis of differences and all": _with(chosen, between=0.25),
        "exponent 0.5": _with(chosen, exponent=0.5),
        "the first features alone": first,
    }
    if FEATURE_MAPS[data][0].patches is None:
        channels = replace(first, whitened=CHANNELS)
        others |= {
            "scattering alone, groups normalised": _with(first, power=1.0, normalised=True),
            "scattering alone, no drawn basis": _with(channels, directions=0),
            "scattering alone, no drawn basis, groups normalised": _with(
                channels, power=1.0, normalised=True, directions=0
            ),
        }
    return {"chosen": chosen, **{name: other for name, other in others.items() if other != chosen}}


def _searched(
    data: str,
    *,
    epsilons: Sequence[float] | None = None,
    seeds: int = 2,
    device: str = "cpu",
    only: str = "",
    processes: int | None = None,
) -> Figure:
    chosen = CHOSEN[data]
    by_level = {level: _candidates(data, chosen[level]) for level in with_settings(epsilons, chosen)}
    # a candidate may be the chosen one at some epsilons, and is not there then
    names = select(dict.fromkeys(name for named in by_level.values() for name in named), only)
    candidates = {
        level: {name: settings for name, settings in named.items() if name in names}
        for level, named in by_level.items()
    }
    return search(
        f"records-{data}-search",
        run,
        data,
        candidates,
        held_out=HELD_OUT[data],
        seeds=seeds,
        device=device,
        processes=processes,
    )


def _final(
    data: str,
    *,
    epsilons: Sequence[float] | None = None,
    seeds: int = 5,
    device: str = "cpu",
    processes: int | None = None,
) -> Figure:
    chosen = {level: (_NAME, CHOSEN[data][level]) for level in with_settings(epsilons, CHOSEN[data])}
    return final(f"records-{data}", run, data, chosen, seeds=seeds, device=device, processes=processes)


records_fashion_mnist_search = variant(
    _searched, "Fashion-MNIST: candidates for a record, on held-out training records.", "fashion-mnist"
)
records_fashion_mnist = variant(
    _final, "Fashion-MNIST: test accuracy of a linear layer at epsilon 1 and 3.", "fashion-mnist"
)
records_mnist_search = variant(
    _searched, "MNIST: candidates for a record, on held-out training records.", "mnist"
)
records_mnist = variant(_final, "MNIST: test accuracy of a linear layer at epsilon 1 and 3.", "mnist")
records_cifar10_search = variant(
    _searched, "CIFAR-10: candidates for a record, on held-out training records.", "cifar10"
)
records_cifar10 = variant(
    _final, "CIFAR-10: test accuracy of a linear layer at epsilon 1, 3 and 8.", "cifar10"
)
