"""beta-DP-SGD of the generalized Gaussian paper: training runs by the shape of their noise.

Gradients are clipped in l_beta up to beta 2 and in l2 above, and the noise is calibrated soundly. The
clipping norm is the best of a few on held-out training records, in runs as long as the others (a shorter
one prefers larger norms), which no epsilon here accounts for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.accounting.compare import typical_norm
from hush.accounting.epsilon import epsilon
from hush.accounting.numerics import Array
from hush.clipping import L2, Lp
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import Dataset, load, tensors, with_features
from hush.models import build
from hush.noise import GeneralizedGaussian
from hush.sampling import Poisson
from hush.training.loop import train
from hush.training.options import Logging, Randomness
from hush_recipes.records.protocol import with_held_out
from hush_recipes.workers import Map

DELTA = 1e-6


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data, network and hyperparameters of a study."""

    data: str
    title: str
    model: str
    features: str | None = None
    batch: int = 256
    epochs: int = 10
    learning_rate: float = 1.0
    momentum: float = 0.0
    adam: bool = False
    clips: tuple[float, ...] = (0.1, 0.5, 2.0)
    """Euclidean norms; in l_beta, what gradients of these lengths typically have."""
    held_out: int = 5000
    """Training records that choose among the clipping norms."""
    seeds: int = 3
    device: str = "cpu"

    def rate(self, records: int) -> float:
        return self.batch / records

    def steps(self, records: int) -> int:
        return self.epochs * records // self.batch


@dataclass(frozen=True)
class Noise:
    """The noise of one shape at one epsilon, for a clipping norm of 1."""

    plan: Plan
    budget: Budget
    steps: int
    published: float
    """Epsilon by the paper's accounting."""


def enough(question: tuple[float, float, float, int]) -> Noise:
    """The least noise of a shape for an epsilon, sampling rate and number of steps."""
    beta, level, rate, steps = question
    plan = Plan(
        sampling=Poisson(rate=rate),
        clipping=Lp(p=beta, norm=1.0) if beta <= 2 else L2(norm=1.0),
        noise=GeneralizedGaussian(beta=beta, multiplier=1.0),
    )
    budget = Budget(epsilon=level, delta=DELTA)
    calibrated = calibrate(plan, budget, steps)
    published = epsilon(calibrated, steps, DELTA, dimension=1)  # Appendix B.2
    return Noise(calibrated, budget, steps, published.epsilon.upper)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    setting: Setting
    noise: Noise
    clip: float
    seed: int
    held_out: int = 0
    """Training records that are scored in place of the test records, and not trained on."""


def accuracy(run: Run) -> float:
    """Share of the test records, or of those held out, that a training run classifies correctly."""
    setting, noise = run.setting, run.noise
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    classes, (x, y), scored = _tensors_on(setting.data, setting.features, setting.device, run.held_out)
    model = build(setting.model, classes=classes, shape=x.shape[1:]).to(setting.device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
    )
    if setting.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    dimension = sum(parameter.numel() for parameter in model.parameters())
    result = train(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        clipped_at(noise.plan, run.clip, dimension),
        (x, y),
        budget=noise.budget,
        steps=noise.steps,
        evaluation=scored,
        logging=Logging(every=noise.steps),
        randomness=Randomness(generator=torch.Generator(setting.device).manual_seed(run.seed)),
    )
    return float(result.metrics[-1]["accuracy"])


def best_clips(over: Map, setting: Setting, noises: Sequence[Noise]) -> list[tuple[float, Array]]:
    """The clipping norm of each noise, by held-out records, and its test accuracies by seed."""
    runs = [
        Run(setting=setting, noise=noise, clip=clip, seed=0, held_out=setting.held_out)
        for noise in noises
        for clip in setting.clips
    ]
    alone = len(setting.clips) == 1
    scores = np.array([0.0 for _ in runs] if alone else list(over(accuracy, runs)))
    best = scores.reshape(len(noises), len(setting.clips)).argmax(1)
    chosen = [setting.clips[index] for index in best]
    results = over(
        accuracy,
        [
            Run(setting=setting, noise=noise, clip=clip, seed=1 + seed)
            for noise, clip in zip(noises, chosen, strict=True)
            for seed in range(setting.seeds)
        ],
    )
    by_seed = np.array(list(results)).reshape(len(noises), setting.seeds)
    return list(zip(chosen, by_seed, strict=True))


def clipped_at(plan: Plan, length: float, dimension: int) -> Plan:
    """The plan with a clipping norm that holds typical gradients to a Euclidean length."""
    if not isinstance(plan.clipping, Lp):
        return replace(plan, clipping=L2(norm=length))
    norm = length * typical_norm(plan.clipping.p, dimension)
    return replace(plan, clipping=replace(plan.clipping, norm=norm))


def inputs(setting: Setting) -> Dataset:
    """The data set, with its features if it is to have some; they are then on disk for every worker."""
    data = load(setting.data)
    return with_features(data, setting.features, device=setting.device) if setting.features else data


Part = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def _tensors_on(data: str, features: str | None, device: str, held_out: int) -> tuple[int, Part, Part]:
    """The classes, and the training and the scored records on the device, kept from run to run."""
    dataset = inputs(Setting(data=data, title="", model="", features=features, device=device))
    x, y, x_test, y_test = (part.to(device) for part in tensors(with_held_out(dataset, held_out)))
    return dataset.classes, (x, y), (x_test, y_test)


def clip_note(setting: Setting) -> str:
    """How the clipping norm was chosen."""
    if len(setting.clips) == 1:
        return f"clipping norm {setting.clips[0]:g}"
    return (
        f"the clipping norm is the best of {len(setting.clips)} on {setting.held_out:,} held-out "
        "training records, which no epsilon accounts for"
    )
