"""Training with twice sampling and hybrid clipping: cells of Tables 1 and 2 of the twice-sampling paper.

At one epsilon: plain DP-SGD at the rate q1 q2 and at q1 (which computes as many gradients as twice
sampling does), twice sampling at (q1, q2), and the latter two with public subspaces and noise that fits
them. All noise is sound and as little as the accountant allows. The paper's network is ResNet22 on
CIFAR-10 (--model resnet22); the default is a small one on Fashion-MNIST, to run on a CPU. 2,000 training
images are held out as the public set, as ImageNet is not to be had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.accounting.shaping import fit_noise
from hush.clipping import L2, L2Linf, Principal, Subspaces
from hush.core.guarantee import Budget
from hush.core.part import Clipping, Sampling
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.data.views import flips_and_shifts
from hush.models import build
from hush.noise import Gaussian
from hush.reproduce.figure import Figure
from hush.sampling import Poisson, Twice
from hush.training.bases import principal_frame
from hush.training.loop import train
from hush.training.thresholds import Norms, public_thresholds

DELTA, CAP = 1e-5, 0.1
PUBLIC, FOR_BASES = 2000, 1200
# What the paper prints for (.06, 1/3) at epsilon 2, 2.5, 4, 8; plain at .02; with subspaces (Table 2).
STEPS = {2.0: 1500, 2.5: 2000, 4.0: 2500, 8.0: 5000}
PRINTED = {
    "plain, q1 q2": (59.5, 61.5, 67.3, 73.8),
    "twice": (61.1, 65.0, 71.4, 77.5),
    "subspaces, twice": (68.6, 71.6, 76.1, 80.8),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how."""

    data: str
    ranks: tuple[int, ...]
    """Of the principal subspaces."""
    groups: int
    rate: float = 0.06
    coordinate_rate: float = 1 / 3
    learning_rate: float
    views: int | None = None
    short: float = 1.0
    """Share of the paper's steps."""


SETTINGS = {
    "resnet22": Setting(
        data="cifar10", ranks=(250, 500, 1000, 1500), groups=4, learning_rate=0.5, views=6
    ),
    "mnist-cnn": Setting(
        data="fashion-mnist", ranks=(50, 100, 200), groups=1, learning_rate=0.5, short=0.1
    ),
}


def twice_training(
    *,
    model: str = "mnist-cnn",
    device: str = "cpu",
    epsilons: Sequence[float] = (2.0,),
    seeds: int = 1,
    ways: Sequence[str] = (),
) -> Figure:
    """Test accuracy and noise of each way to spend the same epsilon."""
    setting = SETTINGS[model]
    dataset = load(setting.data)
    x, y, x_test, y_test = (value.to(device) for value in tensors(dataset))
    public, private = (x[:PUBLIC], y[:PUBLIC]), (x[PUBLIC:], y[PUBLIC:])
    rows: list[list[Any]] = []
    for level in epsilons:
        steps = max(1, round(STEPS[level] * setting.short))
        budget = Budget(epsilon=level, delta=DELTA)
        torch.manual_seed(0)
        start = build(model, classes=dataset.classes, shape=dataset.shape).to(device)
        plans = _plans(setting, start, public, budget, steps)
        plain = _variance(plans["plain, q1 q2"], start)
        for name, plan in plans.items():
            if ways and name not in ways:
                continue
            runs = [
                _accuracy(model, setting, plan, budget, steps, seed, private, public, (x_test, y_test))
                for seed in range(seeds)
            ]
            printed = PRINTED.get(name, (None,) * 4)[list(STEPS).index(level)]
            rows.append(
                [
                    *(level, steps, name, 100 * _variance(plan, start) / plain),
                    *(100 * sum(runs) / seeds, printed if model == "resnet22" else None),
                ]
            )
            print(f"  {name}: {rows[-1][4]:.2f}%", flush=True)

    def draw(axes: Any) -> None:
        for level in epsilons:
            own = [row for row in rows if row[0] == level]
            axes.plot([row[3] for row in own], [row[4] for row in own], "o", label=f"epsilon {level:g}")
            for row in own:
                axes.annotate(row[2], (row[3], row[4]), textcoords="offset points", xytext=(4, 4))
        axes.set(xscale="log", xlabel="noise variance, % of plain at q1 q2", ylabel="test accuracy, %")
        axes.legend(frameon=False)

    return Figure(
        name="twice-training",
        title=f"{model} on {setting.data}, q1 {setting.rate:g}, q2 {setting.coordinate_rate:.3g}",
        header=["epsilon", "steps", "way", "noise variance %", "accuracy %", "printed %"],
        rows=rows,
        draw=draw,
        notes=[
            f"mean of {seeds} seed(s), {len(private[0])} private records, {setting.views or 1} view(s) "
            "a record; noise on the mean, relative to plain DP-SGD at q1 q2 under tight accounting",
            "the printed ones are with ImageNet as the public set, and their own accounting",
        ],
    )


def _plans(
    setting: Setting, model: nn.Module, public: tuple[Tensor, Tensor], budget: Budget, steps: int
) -> dict[str, Plan]:
    """The ways to spend the budget, each with as little noise as it allows."""
    rate, inner = setting.rate, setting.coordinate_rate
    twice = Twice(rate=rate, coordinate_rate=inner)
    low, high = Poisson(rate=rate * twice.coordinate_rate), Poisson(rate=rate)

    def plain(sampling: Sampling, clipping: Clipping) -> Plan:
        plan = Plan(sampling=sampling, clipping=clipping, noise=Gaussian(multiplier=1.0))
        return calibrate(plan, budget, steps)

    def fitted(sampling: Sampling) -> Plan:
        clipping = _subspaces(setting, model, public, capped=sampling is twice)
        plan = Plan(sampling=sampling, clipping=clipping, noise=Gaussian(multiplier=1.0))
        return fit_noise(plan, budget, steps)

    return {
        "plain, q1 q2": plain(low, L2(norm=1.0)),
        "plain, q1": plain(high, L2(norm=1.0)),
        "twice": plain(twice, L2Linf(l2=1.0, linf=CAP)),
        "subspaces, q1": fitted(high),
        "subspaces, twice": fitted(twice),
    }


def _subspaces(
    setting: Setting, model: nn.Module, public: tuple[Tensor, Tensor], capped: bool
) -> Subspaces:
    """Subspaces that share out a norm of 1 as the gradients of public records share theirs."""
    size = sum(value.numel() for value in model.parameters())
    ranks = (*setting.ranks, size - sum(setting.ranks))
    principal = Principal(groups=setting.groups)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    loss = nn.CrossEntropyLoss(reduction="none")
    frame = principal_frame(model, loss, _rows(public, 0, FOR_BASES), ranks, principal, generator)
    norms = Norms.of(model, loss, _rows(public, FOR_BASES, PUBLIC), frame)
    found = public_thresholds(norms, norm=1.0)
    return Subspaces(ranks=ranks, l2=found.l2, linf=found.linf if capped else None, bases=principal)


def _rows(data: tuple[Tensor, Tensor], start: int, end: int) -> tuple[Tensor, Tensor]:
    return data[0][start:end], data[1][start:end]


def _variance(plan: Plan, model: nn.Module) -> float:
    """Of the noise on the mean gradient, summed over the parameters, for one record."""
    size = sum(value.numel() for value in model.parameters())
    balls = plan.clipping.balls(size)
    sizes = [ball.size for ball in balls]
    if isinstance(plan.clipping, Subspaces):
        sizes[-1] = plan.clipping.ranks[-1]
    total = sum(
        count * (float(noise.to_plain()["multiplier"]) * norm) ** 2
        for count, (noise, norm) in zip(sizes, plan.noise.over(balls, plan.clipping.unit), strict=True)
    )
    return total / plan.sampling.expected(1) ** 2


def _accuracy(
    name: str,
    setting: Setting,
    plan: Plan,
    budget: Budget,
    steps: int,
    seed: int,
    private: tuple[Tensor, Tensor],
    public: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
) -> float:
    """Of one training run: SGD with momentum, the rate divided by 10 half-way."""
    device = private[0].device
    torch.manual_seed(seed)
    model = build(name, classes=10, shape=private[0].shape[1:]).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=0.9, weight_decay=2e-4
    )
    result = train(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        plan,
        private,
        budget=budget,
        steps=steps,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2], gamma=0.1),
        evaluation=test,
        evaluate_every=steps,
        generator=torch.Generator(device).manual_seed(seed),
        views=None if setting.views is None else flips_and_shifts(setting.views),
        public=public if isinstance(plan.clipping, Subspaces) else None,
    )
    return float(result.metrics[-1]["accuracy"])
