"""Random legal plans over all parts, each with a tiny model and a few records to run it on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import hush
from hush.core.parts import Clipping, Noise, Part, Release, Sampling

STAGES: tuple[type[Part], ...] = (Sampling, Clipping, Noise, Release)


@dataclass(frozen=True)
class Case:
    """A plan and all that it takes to run it."""

    plan: hush.Plan
    network: str
    optimizer: str
    records: int
    delta: float
    physical_batch: int | None
    seed: int

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return _NETWORKS[self.network][0]()

    def data(self, records: int | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(self.seed + start)
        return _NETWORKS[self.network][2](records or self.records, drawn)

    @property
    def public(self) -> tuple[Tensor, Tensor] | None:
        """Public records, where the plan takes its subspaces from them."""
        bases = getattr(self.plan.clipping, "bases", None)
        return None if bases is None else self.data(24, start=1)

    @property
    def dimension(self) -> int:
        return _NETWORKS[self.network][1]

    @property
    def loss(self) -> nn.Module:
        return nn.MSELoss() if self.network == "one" else nn.CrossEntropyLoss()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        kind, settings = _OPTIMIZERS[self.optimizer]
        optimizer: torch.optim.Optimizer = kind(model.parameters(), **settings)
        return optimizer

    def step(self, model: nn.Module | None = None, **settings: Any) -> hush.PrivateStep:
        """A private step on a model of its own."""
        model = model or self.model()
        return hush.PrivateStep(
            model,
            self.loss,
            self.optimizer_of(model),
            self.plan,
            records=self.records,
            execution=hush.Execution(physical_batch=self.physical_batch),
            public=self.public,
            **{
                "randomness": hush.Randomness(generator=torch.Generator().manual_seed(self.seed)),
                **settings,
            },
        )


def _scores(records: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 2, (records,), generator=drawn)
    return torch.randn(records, 3, generator=drawn), labels


def _numbers(records: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randn(records, 2, generator=drawn)
    return rows[:, :1], rows[:, 1:]


def _tokens(records: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    # among so many that none is likely to be public and private: the names are of the whole input
    inputs = torch.randint(0, 5, (records, 12), generator=drawn)
    return inputs, torch.randint(0, 2, (records,), generator=drawn)


_NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, Callable[..., tuple[Tensor, Tensor]]]] = {
    "one": (lambda: nn.Linear(1, 1, bias=False), 1, _numbers),
    "linear": (lambda: nn.Linear(3, 2), 8, _scores),
    "hidden": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Dropout(0.3), nn.Linear(2, 2)),
        14,
        _scores,
    ),
    "words": (
        lambda: nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(24, 2, bias=False)),
        58,
        _tokens,
    ),
}
_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
}


_RECORDS = [1, 2, 3, 7, 12]


def legal(seed: int, *, quick: bool) -> Case:
    """The plan of that number, the same one every time; `quick` leaves out those slow to price."""
    pick = Random(seed)
    network = pick.choice(list(_NETWORKS))
    dimension = _NETWORKS[network][1]
    families = [_normal, _normal, _blocks, _powers, _bounded, _selective, _scaled, _limited, _cyclic]
    plan = pick.choice(families)(pick, dimension, quick)
    return Case(
        plan=plan,
        network=network,
        optimizer=pick.choice(list(_OPTIMIZERS)),
        records=getattr(plan.sampling, "records", None) or pick.choice(_RECORDS),
        delta=pick.choice([1e-300, 1e-9, 1e-5, 1e-5, 0.01, 0.05]),
        physical_batch=pick.choice([None, 1, 2, 5]),
        seed=seed,
    )


def _spread(pick: Random, low: float, high: float, *extremes: float) -> float:
    """Mostly a number between the two, in logarithms; sometimes one of the extremes."""
    if extremes and pick.random() < 0.15:
        return pick.choice(extremes)
    return math.exp(pick.uniform(math.log(low), math.log(high)))


def _rate(pick: Random) -> float:
    return _spread(pick, 0.01, 1.0, 1e-9, 1.0)


def _norm(pick: Random) -> float:
    return _spread(pick, 0.01, 10.0, 1e-12, 1e12)


def _multiplier(pick: Random) -> float:
    return _spread(pick, 0.3, 30.0, 1e-12, 1e-3, 1e15)


def _participation(pick: Random) -> Sampling:
    return hush.FullBatch() if pick.random() < 0.3 else hush.Poisson(_rate(pick))


def _sampling(pick: Random, quick: bool) -> Sampling:
    """Any sampling."""
    if pick.random() > (0.3 if quick else 0.4):
        return _participation(pick)
    coordinate_rate = _spread(pick, 1 / 256, 1.0, 1 / 512, 1.0)
    if pick.random() < 0.5:
        return hush.Coordinate(rate=coordinate_rate)
    return hush.Twice(rate=_rate(pick), coordinate_rate=coordinate_rate)


def _normal(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    clippings: list[Clipping] = [
        hush.L2(_norm(pick)),
        hush.Linf(_norm(pick)),
        hush.L2Linf(l2=_norm(pick), linf=_norm(pick)),
    ]
    return hush.Plan(
        sampling=_sampling(pick, quick),
        clipping=pick.choice(clippings),
        noise=hush.Gaussian(_multiplier(pick)),
    )


def _blocks(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    sizes = _parts(pick, dimension)
    clipping: Clipping
    if pick.random() < 0.4:
        clipping = hush.Box(bounds=[(size, _norm(pick)) for size in sizes])
    else:
        # a basis needs directions that public gradients have: at least 12 of 24 records differ
        principal = len(sizes) > 1 and sum(sizes[:-1]) <= 4 and pick.random() < 0.5
        clipping = hush.Subspaces(
            ranks=sizes,
            l2=[_spread(pick, 0.01, 10.0) for _ in sizes],
            linf=None if pick.random() < 0.5 else [_spread(pick, 0.01, 10.0) for _ in sizes],
            bases=hush.Principal(groups=1, every=pick.choice([1, 2, 100])) if principal else None,
        )
    blocks = len(clipping.sensitivity(dimension))
    noise: Noise = hush.Gaussian(_multiplier(pick))
    if pick.random() < 0.5:
        noise = hush.BlockGaussian(multipliers=[_multiplier(pick) for _ in range(blocks)])
    return hush.Plan(sampling=_sampling(pick, quick), clipping=clipping, noise=noise)


def _parts(pick: Random, dimension: int) -> list[int]:
    """The dimension cut into one to four parts."""
    cuts = sorted(pick.sample(range(1, dimension), min(dimension - 1, pick.choice([0, 1, 1, 3]))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, dimension], strict=True)]


def _powers(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    """Noise exp(-|x / s|^beta) under the clippings that its charge is proved for."""
    multiplier = _spread(pick, 0.5, 30.0, 1e-12, 1e-3, 1e15)
    beta = pick.choice([1.0, 2.0, pick.uniform(1, 2), pick.uniform(2, 4)])
    if not quick and dimension < 20 and pick.random() < 0.2:  # slow to price: tens of seconds
        beta = pick.choice([12.0, 12.1, 50.0])
    noises: list[Noise] = [hush.GeneralizedGaussian(beta=beta, multiplier=multiplier)]
    if beta == 1:
        noises.append(hush.Laplace(multiplier))
    if beta == 2:
        noises.append(hush.Gaussian(multiplier))
    clippings: list[Clipping] = [hush.Lp(p=beta, norm=_norm(pick))]
    if beta >= 2:
        clippings.append(hush.L2(_norm(pick)))
    return hush.Plan(
        sampling=_participation(pick), clipping=pick.choice(clippings), noise=pick.choice(noises)
    )


def _bounded(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    norm = _spread(pick, 0.01, 10.0)
    scale, bound = norm * _spread(pick, 0.3, 30.0), norm * _spread(pick, 0.1, 100.0, 1e-9, 1e9)
    noises: list[Noise] = [
        hush.Rectified(scale=scale, bound=bound),
        hush.Truncated(scale=scale, bound=bound),
        hush.StochasticSign(scale=scale),
        hush.Quantized(scale=scale, bound=bound, levels=pick.choice([2, 3, 16, 1000])),
    ]
    clippings: list[Clipping] = [hush.L2(norm), hush.Linf(norm), hush.L2Linf(l2=norm, linf=_norm(pick))]
    return hush.Plan(
        sampling=_sampling(pick, quick), clipping=pick.choice(clippings), noise=pick.choice(noises)
    )


def _selective(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    test: Any = "summed" if quick else pick.choice(["summed", "mean"])
    accounting: Any = "per-trial"
    if test == "mean":
        accounting = pick.choice(["per-trial", "per-trial", "per-acceptance", "published"])
    release: Release = hush.Selective(
        rate=_rate(pick),
        clip=_norm(pick),
        multiplier=_spread(pick, 0.5, 10.0),
        threshold=pick.uniform(-1.0, 1.0),
        accounting=accounting,
        test=test,
    )
    return hush.Plan(
        sampling=_participation(pick),
        clipping=hush.L2(_norm(pick)),
        noise=hush.Gaussian(_spread(pick, 0.5, 30.0)),
        release=release,
    )


def _scaled(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    norm = _norm(pick)
    return hush.Plan(
        sampling=_participation(pick),
        clipping=pick.choice([hush.Importance(norm), hush.Normalized(norm), hush.Quantile(norm)]),
        noise=hush.Gaussian(_multiplier(pick)),
    )


def _limited(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    records = pick.choice(_RECORDS)
    limit = pick.randint(1, records)
    sampling: Sampling = hush.FixedSize(size=limit, records=records)
    if pick.random() < 0.5:
        sampling = hush.TruncatedPoisson(rate=_rate(pick), max_batch=limit, records=records)
    elif pick.random() < 0.5:
        sampling = hush.RandomAllocation(steps=pick.randint(1, 8))
    return hush.Plan(
        sampling=sampling, clipping=hush.L2(_norm(pick)), noise=hush.Gaussian(_multiplier(pick))
    )


def _cyclic(pick: Random, dimension: int, quick: bool) -> hush.Plan:
    norm, cycle = _norm(pick), pick.randint(1, 5)
    noise: Noise = hush.Gaussian(_multiplier(pick))
    if pick.random() < 0.7:
        strategy = [1.0, *(pick.uniform(0.0, 0.2) for _ in range(pick.randrange(cycle)))]
        noise = hush.Banded(multiplier=_multiplier(pick), strategy=strategy)
    return hush.Plan(
        sampling=hush.CyclicPoisson(rate=_rate(pick), cycle=cycle),
        clipping=pick.choice([hush.L2(norm), hush.Normalized(norm), hush.L2Linf(l2=norm, linf=norm)]),
        noise=noise,
    )


def kinds_of(stage: type[Part]) -> set[str]:
    """The library's parts of a stage; tests define others."""
    return {name for name, kind in stage.kinds.items() if kind.__module__.startswith("hush.")}
