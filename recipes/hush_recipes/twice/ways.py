"""Ways to spend a budget, as the twice-sampling paper compares them, each with the least noise."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate, fit_noise
from hush.clipping import L2, L2Linf, Principal, Subspaces
from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget
from hush.core.parts import Clipping, Sampling
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.models import build
from hush.noise import BlockGaussian, Gaussian
from hush.sampling import Poisson, Twice
from hush.training.methods.public_bases import public_thresholds

DELTA, CAP = 1e-5, 0.1
PUBLIC = 2000
SHAPES = {"": 1.0, ", half-way": 0.5, ", isotropic": 0.0}
"""Powers of the deviations of least total variance."""
STEPS = {2.0: 1500, 2.5: 2000, 4.0: 2500, 8.0: 5000}
THIRD = 1 / 3
_IN_SUBSPACES = ("subspaces, larger batch", "subspaces, twice")
NAMES = (
    *("plain", "plain, larger batch", "twice"),
    *(f"{name}{suffix}" for name in _IN_SUBSPACES for suffix in SHAPES),
)
"""Of all ways."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data, network and hyperparameters of a study."""

    data: str
    model: str
    device: str = "cpu"
    ranks: tuple[int, ...]
    """Of the principal subspaces."""
    groups: int
    rates: tuple[tuple[float, float], ...]
    """Pairs q1, q2."""
    learning_rates: tuple[float, ...]
    """Each way has its best of these on held-out training images."""
    views: int = 1
    """Augmented views of an image, whose mean gradient is clipped."""
    every: int = 100
    """Steps after which the bases are computed anew."""
    short: float = 1.0
    """Share of the paper's steps."""
    searched: float = 1.0
    """Share of those that a learning rate is tried with."""


SETTINGS = {
    "resnet22": Setting(
        data="cifar10",
        model="resnet22",
        ranks=(250, 500, 1000, 1500),
        groups=4,
        rates=((0.02, 0.5),),
        learning_rates=(0.2, 0.5, 1.0, 2.0),
        views=6,
        every=25,
        searched=0.2,
    ),
    "mnist-cnn": Setting(
        data="fashion-mnist",
        model="mnist-cnn",
        ranks=(50, 100, 200),
        groups=1,
        rates=((0.06, THIRD),),
        learning_rates=(0.3, 1.0, 3.0),
        short=0.04,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to spend a budget, for so many steps."""

    name: str
    epsilon: float
    steps: int
    plan: Plan


def setting_of(model: str) -> Setting:
    """The setting of a network; one without raises."""
    if model not in SETTINGS:
        raise InvalidValue(
            f"model={model!r} must be one of {', '.join(SETTINGS)}: subspaces and rates are chosen for "
            "these networks. Pass e.g. --model mnist-cnn."
        )
    return SETTINGS[model]


def ways_of(
    setting: Setting, epsilons: Sequence[float], steps: int | None, names: Collection[str]
) -> list[Way]:
    """The named ways at all epsilons; one that two pairs of rates share is there once.

    Args:
        setting: data, network and rates.
        epsilons: budgets.
        steps: of a run; None: the setting's share of the paper's, by epsilon.
        names: of `NAMES`; no others are calibrated.
    """
    lengths = [steps or _paper_steps(setting, level) for level in epsilons]
    _, public, _ = inputs_on(setting)
    start = new_model(setting, seed=0)
    ways: dict[tuple[float, Plan], Way] = {}
    for level, length in zip(epsilons, lengths, strict=True):
        budget = Budget(epsilon=level, delta=DELTA)
        for rates in setting.rates:
            for name, plan in _plans(setting, rates, start, public, budget, length, names).items():
                ways.setdefault((level, plan), Way(name=name, epsilon=level, steps=length, plan=plan))
    return list(ways.values())


def _paper_steps(setting: Setting, epsilon: float) -> int:
    if epsilon not in STEPS:
        raise InvalidValue(
            f"there is no number of steps for epsilon {epsilon:g}: choose from "
            f"{', '.join(f'{level:g}' for level in STEPS)}, or pass --steps as well, e.g. --steps 60."
        )
    return max(1, round(STEPS[epsilon] * setting.short))


Data = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def inputs_on(setting: Setting) -> tuple[Data, Data, Data]:
    """The private, the public and the test records on the device, kept from run to run."""
    x, y, x_test, y_test = (value.to(setting.device) for value in tensors(load(setting.data)))
    return (x[PUBLIC:], y[PUBLIC:]), (x[:PUBLIC], y[:PUBLIC]), (x_test, y_test)


def new_model(setting: Setting, seed: int) -> nn.Module:
    """A new network."""
    torch.manual_seed(seed)
    shape = inputs_on(setting)[0][0].shape[1:]
    return build(setting.model, classes=10, shape=shape).to(setting.device)


def _plans(
    setting: Setting,
    rates: tuple[float, float],
    model: nn.Module,
    public: Data,
    budget: Budget,
    steps: int,
    names: Collection[str],
) -> dict[str, Plan]:
    """The named ways to spend the budget, each with as little noise as it allows."""
    rate, inner = rates
    twice = Twice(rate=rate, coordinate_rate=inner)
    low, high = Poisson(rate=round(rate * inner, 9)), Poisson(rate=rate)
    without: dict[str, tuple[Sampling, Clipping]] = {
        "plain": (low, L2(norm=1.0)),
        "plain, larger batch": (high, L2(norm=1.0)),
        "twice": (twice, L2Linf(l2=1.0, linf=CAP)),
    }
    plans = {}
    for name, (sampling, clipping) in without.items():
        if name in names:
            plan = Plan(sampling=sampling, clipping=clipping, noise=Gaussian(multiplier=1.0))
            plans[name] = calibrate(plan, budget, steps)
    for name, sampling in zip(_IN_SUBSPACES, (high, twice), strict=True):
        powers = {f"{name}{suffix}": power for suffix, power in SHAPES.items()}
        powers = {full: power for full, power in powers.items() if full in names}
        if powers:
            clipping = _subspaces(setting, model, public, capped=sampling is twice)
            plan = Plan(sampling=sampling, clipping=clipping, noise=Gaussian(multiplier=1.0))
            least = fit_noise(plan, budget, steps)
            plans |= {full: shaped(least, power, budget, steps) for full, power in powers.items()}
    return plans


def shaped(plan: Plan, power: float, budget: Budget, steps: int) -> Plan:
    """The plan with deviations that are a power of its own, as little as the budget allows.

    Args:
        plan: with noise of least total variance in each block.
        power: 1: as it is; 0: the same deviation in all blocks.
        budget: of all steps.
        steps: how many.
    """
    blocks = plan.clipping.sensitivity(None)
    own = plan.noise.per_block(blocks, plan.clipping.reference_norm)
    deviations = [float(noise.to_plain()["multiplier"]) * norm for noise, norm in own]
    multipliers = [deviation**power / norm for deviation, (_, norm) in zip(deviations, own, strict=True)]
    return calibrate(replace(plan, noise=BlockGaussian(multipliers=multipliers)), budget, steps)


def _subspaces(setting: Setting, model: nn.Module, public: Data, capped: bool) -> Subspaces:
    """Subspaces that share out a norm of 1 as the gradients of public records share theirs."""
    size = sum(value.numel() for value in model.parameters())
    ranks = (*setting.ranks, size - sum(setting.ranks))
    return public_thresholds(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        rows_of(public, 0, PUBLIC),
        ranks=ranks,
        norm=1.0,
        bases=Principal(groups=setting.groups, every=setting.every),
        entries=capped,
    )


def rows_of(data: Data, start: int, end: int | None) -> Data:
    return data[0][start:end], data[1][start:end]


def variance_of_mean(plan: Plan, model: nn.Module) -> float:
    """Of the noise on the mean gradient, summed over the parameters, for one record."""
    size = sum(value.numel() for value in model.parameters())
    blocks = plan.clipping.sensitivity(size)
    sizes = [block.size for block in blocks]
    if isinstance(plan.clipping, Subspaces):
        sizes[-1] = plan.clipping.ranks[-1]
    total = sum(
        count * (float(noise.to_plain()["multiplier"]) * norm) ** 2
        for count, (noise, norm) in zip(
            sizes, plan.noise.per_block(blocks, plan.clipping.reference_norm), strict=True
        )
    )
    return total / plan.sampling.expected(1) ** 2
