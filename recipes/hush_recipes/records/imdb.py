"""IMDB film reviews without pretraining: logistic regression on a bag of words, by DP-SGD.

The list of words and their ranks were counted on the training reviews, and are taken as public, as in
`hush_recipes.data.imdb`. So is the number of words that a review keeps, which was chosen knowing the
lengths of training reviews (`LENGTH`). Epsilon covers neither. No other statistic of the reviews is used
but the validation scores that settings were chosen by (`hush_recipes.records.protocol`), so that the
steps are all that is charged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import Dataset
from hush.gradients.tree import tree_map
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.options import Execution, Randomness
from hush.training.step import PrivateStep
from hush_recipes.data.imdb import read_imdb
from hush_recipes.dpsur.runs import calibrated
from hush_recipes.figure import Figure
from hush_recipes.records.bag_of_words import BagOfWords, SparseLogistic
from hush_recipes.records.protocol import (
    DELTA,
    Job,
    Outcome,
    final,
    search,
    with_held_out,
    with_settings,
)

HELD_OUT = 5000
LENGTH = 1024
"""Words of a review, the last ones. Two in a thousand of the training reviews are longer: a statistic of
private records, which is not charged."""
VOCABULARY = 20_002
_PHYSICAL_BATCH = 512
"""So that sums over the positions of so many reviews round within what is paid for."""

Part = tuple[tuple[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Features of a review, and DP-SGD with momentum on them."""

    features: BagOfWords = field(default_factory=BagOfWords)
    sampling_rate: float = 0.2
    steps: int = 200
    clip: float = 0.08
    """Gradients are shorter than 1, the norm of the features."""
    learning_rate: float
    momentum: float = 0.9
    shrinkage: float = 0.5
    """Standard deviations of their noise by which the last weights are moved towards zero."""


def run(job: Job[Settings]) -> Outcome:
    """One training run; its ledger has the steps, which are calibrated to the whole budget."""
    settings = job.settings
    train, test = _parts(job.data, job.held_out, settings.features, job.device)
    plan = Plan(
        sampling=Poisson(rate=settings.sampling_rate),
        clipping=L2(norm=settings.clip),
        noise=Gaussian(multiplier=1.0),
    )
    plan = calibrated(plan, Budget(epsilon=job.epsilon, delta=DELTA), settings.steps)
    model = SparseLogistic(settings.features.size).to(job.device)
    loss = nn.CrossEntropyLoss()
    step = PrivateStep(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=settings.momentum),
        plan,
        records=len(train[1]),
        ledger=Ledger(),
        randomness=Randomness(generator=torch.Generator(job.device).manual_seed(job.seed)),
        execution=Execution(physical_batch=_PHYSICAL_BATCH),
    )
    for batch in step.batches(train, steps=settings.steps):
        step(batch)
    assert isinstance(plan.noise, Gaussian)
    noise = plan.noise.multiplier * settings.clip / (settings.sampling_rate * len(train[1]))
    shrink(model, settings.shrinkage * noise * noise_gain(settings))
    step.adopt_weights()
    return Outcome(
        accuracy=evaluate(model, loss, test)["accuracy"],
        epsilon=step.spent(DELTA).epsilon.upper,
        multiplier=plan.noise.multiplier,
    )


@torch.no_grad()
def shrink(model: nn.Module, threshold: float) -> None:
    """Soft thresholding of the weights: post-processing of what was released, at no cost."""
    for weight in model.parameters():
        weight.copy_(functional.softshrink(weight, threshold))


def noise_gain(settings: Settings) -> float:
    """Standard deviation of a weight after the last step, where that of each step's noise is 1.

    Momentum m turns the noise of a step that k steps follow into (1 - m**(k + 1)) / (1 - m) times it.
    """
    momentum = settings.momentum
    factors = [(1 - momentum ** (k + 1)) / (1 - momentum) for k in range(settings.steps)]
    return settings.learning_rate * math.hypot(*factors)


@lru_cache(maxsize=1)
def _parts(data: str, held_out: int, features: BagOfWords, device: str) -> tuple[Part, Part]:
    """Features and labels of the training part, and of the part that is scored."""
    dataset = with_held_out(_reviews(data), held_out)
    train, test = (
        (features(texts), torch.from_numpy(labels))
        for texts, labels in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test))
    )
    on_device: tuple[Part, Part] = tree_map((train, test), lambda rows: rows.to(device))
    return on_device


@lru_cache(maxsize=1)
def _reviews(data: str) -> Dataset:
    return read_imdb(None, LENGTH, VOCABULARY)


START = {
    1.0: Settings(learning_rate=40.0),
    3.0: Settings(learning_rate=90.0),
    8.0: Settings(learning_rate=150.0),
}
"""Settings around which the search looks, by epsilon."""
CHOSEN = {
    1.0: replace(START[1.0], features=BagOfWords(words=3000)),
    3.0: START[3.0],
    8.0: START[8.0],
}
"""What the search was best with; where nothing was clearly better, its start."""
_NAME = "bag of words, logistic"
_TAKEN_AS_PUBLIC = (
    "the ranks of words, counted on the training reviews, are taken as public, and so is the length "
    f"that reviews are cut to, {LENGTH:,} words, which was chosen knowing theirs"
)


def records_imdb_search(
    *,
    epsilons: Sequence[float] | None = None,
    seeds: int = 2,
    device: str = "cpu",
    processes: int | None = None,
) -> Figure:
    """IMDB: settings of a bag of words on held-out training reviews, at epsilon 1, 3 and 8."""
    named = candidates()
    return search(
        "records-imdb-search",
        run,
        "imdb",
        {level: named[level] for level in with_settings(epsilons, START)},
        held_out=HELD_OUT,
        seeds=seeds,
        device=device,
        processes=processes,
        notes=[_TAKEN_AS_PUBLIC],
    )


def records_imdb(
    *,
    epsilons: Sequence[float] | None = None,
    seeds: int = 5,
    device: str = "cpu",
    processes: int | None = None,
) -> Figure:
    """IMDB without pretraining: test accuracy of a bag of words at epsilon 1, 3 and 8."""
    return final(
        "records-imdb",
        run,
        "imdb",
        {level: (_NAME, CHOSEN[level]) for level in with_settings(epsilons, START)},
        seeds=seeds,
        device=device,
        processes=processes,
        notes=[_TAKEN_AS_PUBLIC],
    )


def candidates() -> dict[float, dict[str, Settings]]:
    """Settings of the search by name, by epsilon; most of them at epsilon 3."""
    named = {level: _rates(settings) for level, settings in START.items()}
    named[1.0] |= _some_features(START[1.0])
    named[3.0] |= _some_features(START[3.0]) | _others(START[3.0])
    return named


def _rates(start: Settings) -> dict[str, Settings]:
    return {
        f"rate {rate:g}": replace(start, learning_rate=rate)
        for rate in (start.learning_rate, start.learning_rate / 2, 2 * start.learning_rate)
    }


def _some_features(start: Settings) -> dict[str, Settings]:
    """Features that differ in one thing, at the same rate."""
    features = start.features
    changed = {
        "no pairs": replace(features, share=0.0),
        "3,000 words": replace(features, words=3000),
        "8,000 words": replace(features, words=8000),
    }
    return {name: replace(start, features=other) for name, other in changed.items()}


def _others(start: Settings) -> dict[str, Settings]:
    """Settings that differ in one thing, and in the rate where that goes with it."""
    features, rate = start.features, start.learning_rate
    return {
        "a tenth for pairs": replace(start, features=replace(features, share=0.1)),
        "pairs of 100 words": replace(start, features=replace(features, pairs=100)),
        "words weigh the same": replace(start, features=replace(features, exponent=0.0)),
        "no emphasis on the end": replace(start, features=replace(features, emphasis=0.0)),
        "not shrunk": replace(start, shrinkage=0.0),
        "clip 1, a quarter of the rate": replace(start, clip=1.0, learning_rate=rate / 4),
        "100 steps, twice the rate": replace(start, steps=100, learning_rate=2 * rate),
        "half the batch": replace(start, sampling_rate=start.sampling_rate / 2),
    }
