"""Fashion-MNIST and MNIST: one linear layer on scattering features in a public basis, whitened twice.

First by the covariance of images that are drawn by a formula, which costs nothing; then, in the leading
directions, by the records' own noisy covariance (docs/guarantees/baselines.md, 1). Records have length 1
after either, so that every norm is public. The weights that are scored are the mean of the last ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.data.features import with_features
from hush.data.scattering import CHANNELS, scatter
from hush.noise import Gaussian
from hush.report.figure import Figure
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.methods.whitening import NoisyWhitening
from hush.training.step import PrivateStep
from recipes.dpsur.inputs import Inputs, normalised
from recipes.records.drawings import Draw, shapes, strokes
from recipes.records.protocol import DELTA, Job, Outcome, final, search, with_held_out
from recipes.registry import variant

HELD_OUT = 10_000
DRAWN = 8_000
"""Pairs of images."""
DRAWINGS: Mapping[str, Draw] = {"fashion-mnist": shapes, "mnist": strokes}
_AT_ONCE = 2000


@dataclass(frozen=True, kw_only=True)
class Features:
    """Public map of an image to inputs of length 1, channels x places."""

    power: float = 0.25
    """To which scattering features are raised; they are averages of moduli, and not negative."""
    normalised: bool = False
    """Whether groups of channels are normalised next, record by record."""
    directions: int = 3000
    """Principal directions of the drawn images' features that are kept; 0: no basis, and no mean."""
    exponent: float = 0.35
    """Each is divided by this power of its variance in the drawn images; 0.5: whitening."""
    floor: float = 2.6e-4
    """Added to the variances, as a share of their sum."""
    between: float = 1.0
    """Weight of the covariance of all drawn images, beside that of what differs within pairs."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run."""

    features: Features = field(default_factory=Features)
    whitened: int = 400
    """Leading channels that are whitened by paid statistics."""
    multiplier: float = 16.0
    """Noise of their mean and of their covariance."""
    batch: int = 8192
    steps: int = 300
    rate: float
    clip: float = 0.1
    momentum: float = 0.9
    tail: float = 0.3
    """Share of the steps over whose weights the mean is taken; 0: the last weights."""


def run(job: Job[Settings]) -> Outcome:
    """Accuracy of one training run, whose statistics and steps are on one ledger."""
    settings, ledger = job.settings, Ledger()
    public = _inputs(job.data, job.held_out, settings.features, job.device)
    inputs = whitened(public, settings, ledger, job.seed)
    plan = calibrate(
        Plan(
            sampling=Poisson(rate=min(1.0, settings.batch / inputs.records)),
            clipping=L2(norm=settings.clip),
            noise=Gaussian(multiplier=1.0),
        ),
        Budget(epsilon=job.epsilon, delta=DELTA),
        settings.steps,
        spent=ledger.counts,
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs.train[0][0].numel(), inputs.classes))
    model.to(job.device)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    loss = nn.CrossEntropyLoss()
    step = PrivateStep(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=settings.rate, momentum=settings.momentum),
        plan,
        records=inputs.records,
        ledger=ledger,
        generator=torch.Generator(job.device).manual_seed(job.seed),
    )
    tail = max(1, round(settings.tail * settings.steps))
    means = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for done, batch in enumerate(step.batches(inputs.train, steps=settings.steps), start=1):
        step(batch)
        if done > settings.steps - tail:
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean += parameter.detach() / tail
    with torch.no_grad():
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.copy_(mean)
    step.adopt_weights()  # a mean of released weights is post-processing
    assert isinstance(plan.noise, Gaussian)
    return Outcome(
        accuracy=evaluate(model, loss, inputs.test)["accuracy"],
        epsilon=step.spent(DELTA).epsilon.upper,
        multiplier=plan.noise.multiplier,
    )


@lru_cache(maxsize=1)
def _inputs(data: str, held_out: int, features: Features, device: str) -> Inputs:
    """The data set's inputs on the device, kept from run to run: no run changes them."""
    dataset = with_held_out(with_features(load(data), "scattering", device=device), held_out)
    x, y, x_test, y_test = (part.to(device) for part in tensors(dataset))
    drawn = _drawn(data, device) if features.directions else None
    x, x_test = public_inputs([x, x_test], drawn, features)
    return Inputs(classes=dataset.classes, train=(x, y), test=(x_test, y_test))


@lru_cache(maxsize=1)
def _drawn(data: str, device: str) -> tuple[Tensor, Tensor]:
    """Scattering features of the pairs of images that are drawn for a data set."""
    first, second = (
        torch.cat([scatter(some.to(device)) for some in images.split(_AT_ONCE // 20)])
        for images in DRAWINGS[data](DRAWN, torch.Generator().manual_seed(0))
    )
    return first, second


def public_inputs(
    parts: list[Tensor], drawn: tuple[Tensor, Tensor] | None, features: Features
) -> list[Tensor]:
    """Inputs from scattering features, each record's by itself.

    Args:
        parts: scattering features of records.
        drawn: those of pairs of drawn images; None: without a basis of theirs.
        features: the map.
    """

    def powers(values: Tensor) -> Tensor:
        raised = values.clamp(min=0) ** features.power
        return normalised(raised) if features.normalised else raised

    if drawn is None:
        return [
            torch.cat([unit(powers(some)).flatten(2) for some in part.split(_AT_ONCE)]) for part in parts
        ]
    first, second = (powers(values).flatten(1) for values in drawn)
    mean, basis = principal_scaling(first, second, features)
    return [
        torch.cat(
            [unit((powers(some).flatten(1) - mean) @ basis)[:, :, None] for some in part.split(_AT_ONCE)]
        )
        for part in parts
    ]


def principal_scaling(first: Tensor, second: Tensor, features: Features) -> tuple[Tensor, Tensor]:
    """Mean of the rows of pairs, and principal directions scaled by a power of the variances.

    Args:
        first: a row for each pair.
        second: the other row of each.
        features: weight of either covariance, directions that are kept, exponent and floor.
    """
    mean = (first.mean(0) + second.mean(0)) / 2
    within = (first - second).double()
    covariance = (1 - features.between) / (2 * len(first)) * (within.T @ within)
    for rows in (first, second):
        centred = (rows - mean).double()
        covariance += features.between / (2 * len(first)) * (centred.T @ centred)
    variances, directions = torch.linalg.eigh(covariance)
    kept = variances.flip(0).clamp(min=0)[: features.directions]
    scales = (kept + features.floor * variances.sum()) ** -features.exponent
    return mean, (directions.flip(1)[:, : features.directions] * scales).float()


def unit(values: Tensor) -> Tensor:
    """Each record scaled to length 1; one of zeros stays as it is."""
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1).clamp(
        min=torch.finfo(values.dtype).tiny
    )
    scaled: Tensor = values / lengths.view(-1, *[1] * (values.ndim - 1))
    return scaled


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
        return torch.cat(
            [
                unit(torch.cat([layer(some[:, :leading]), some[:, leading:]], 1))
                for some in part.split(_AT_ONCE)
            ]
        )

    (x, y), (x_test, y_test) = inputs.train, inputs.test
    return replace(inputs, train=(whiten(x), y), test=(whiten(x_test), y_test))


_DIGITS = Features(power=0.5, between=0.25)
_CHOSEN = {
    "fashion-mnist": {1.0: Settings(rate=67.0), 3.0: Settings(rate=133.0)},
    "mnist": {
        1.0: Settings(features=_DIGITS, rate=53.0),
        3.0: Settings(features=_DIGITS, rate=133.0),
    },
}
_NAME = "linear, drawn basis, whitened"


def _candidates(chosen: Settings) -> dict[str, Settings]:
    """The chosen settings, and others that differ from them in one part."""
    features = chosen.features
    grouped = replace(features, power=1.0, normalised=True)
    channels = replace(chosen, whitened=CHANNELS)
    others = {
        "power 0.25": replace(chosen, features=replace(features, power=0.25)),
        "power 0.5": replace(chosen, features=replace(features, power=0.5)),
        "power 1": replace(chosen, features=replace(features, power=1.0)),
        "groups normalised": replace(chosen, features=grouped),
        "basis of all drawn images": replace(chosen, features=replace(features, between=1.0)),
        "basis of differences and all": replace(chosen, features=replace(features, between=0.25)),
        "exponent 0.5": replace(chosen, features=replace(features, exponent=0.5)),
        "no drawn basis": replace(channels, features=replace(features, directions=0)),
        "no drawn basis, groups normalised": replace(channels, features=replace(grouped, directions=0)),
        "100 channels whitened": replace(chosen, whitened=100),
        "last weights": replace(chosen, tail=0.0),
        "clip 1": replace(chosen, clip=1.0, rate=chosen.rate / 10),
        "rate x 2/3": replace(chosen, rate=chosen.rate * 2 / 3),
        "rate x 3/2": replace(chosen, rate=chosen.rate * 3 / 2),
    }
    return {"chosen": chosen, **{name: other for name, other in others.items() if other != chosen}}


def _searched(data: str, *, seeds: int = 2, device: str = "cpu", processes: int | None = None) -> Figure:
    candidates = {level: _candidates(chosen) for level, chosen in _CHOSEN[data].items()}
    return search(
        f"records-{data}-search",
        run,
        data,
        candidates,
        held_out=HELD_OUT,
        seeds=seeds,
        device=device,
        processes=processes,
    )


def _final(data: str, *, seeds: int = 5, device: str = "cpu", processes: int | None = None) -> Figure:
    chosen = {level: (_NAME, settings) for level, settings in _CHOSEN[data].items()}
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
