"""Seeded runs of a few steps: the weights at the end and what the ledger says of them."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hush
from hush.data import flips_and_shifts
from hush_recipes.bounded.linear import LinearDescent
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent
from hush_recipes.statistics.moments import NoisyWhitening
from hush_recipes.statistics.quantile import NoisyQuantile
from tests.unchanged.entry import Entries, entries
from tests.unchanged.networks import (
    CLASSES,
    Data,
    cnn,
    digits,
    linear,
    lstm,
    mlp,
    public,
    seeded,
    tokens,
    transformer,
    wide,
)

_DELTA = 1e-5
_STEPS = 3


_SOME = hush.Poisson(0.5)
_TWICE = hush.Twice(rate=0.5, coordinate_rate=0.5)


def _plan(clipping: Any, noise: Any, sampling: Any = _SOME, release: Any = None) -> hush.Plan:
    return hush.Plan(sampling=sampling, clipping=clipping, noise=noise, release=release or hush.Always())


def _stepped(
    network: Callable[[], nn.Module],
    plan: hush.Plan,
    data: Callable[[], Data] = digits,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> Entries:
    """Some steps of a `PrivateStep`."""
    torch.manual_seed(0)
    model, (inputs, targets) = network(), data()
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer(model.parameters(), lr=0.1),
        plan,
        records=len(inputs),
        randomness=hush.Randomness(generator=seeded()),
        **settings,
    )
    present = torch.arange(len(inputs)) % 9 != 0
    moved = [step(batch) for batch in step.batches((inputs, targets), _STEPS, present)]
    return {**entries("moved", moved), **_weights(model), **_charges(step.ledger)}


def _trained() -> Entries:
    """A whole run of `hush.train`, with the files that it leaves."""
    torch.manual_seed(0)
    model = linear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = hush.train(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            _plan(hush.L2(1.0), hush.Gaussian(2.0)),
            digits(),
            budget=hush.Budget(epsilon=8.0, delta=_DELTA),
            steps=_STEPS,
            evaluation=public(),
            checkpoints=hush.Checkpoints(directory=folder),
            randomness=hush.Randomness(generator=seeded()),
        )
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        for line in lines:  # drawn anew for each run, and what follows from it
            for key in ("id", "run", "chain"):
                line.pop(key, None)
        return {
            **_weights(model),
            **entries("guarantee", run.guarantee),
            **entries("accuracy", run.metrics[-1]["accuracy"]),
            **entries("ledger", lines),
            **entries("plan.toml", (folder / "plan.toml").read_bytes()),
            **entries("model.safetensors", (folder / "model.safetensors").read_bytes()),
        }


def _adaptive() -> Entries:
    torch.manual_seed(0)
    model, ledger = linear(), hush.Ledger()
    descent = AdaptiveDescent(
        model,
        nn.CrossEntropyLoss(),
        digits(),
        hush.Budget(epsilon=4.0, delta=_DELTA),
        Adaptive(clip=0.5, sizes=4, splits=4),
        ledger=ledger,
        generator=seeded(),
    )
    return {**entries("lengths", list(descent.run())), **_weights(model), **_charges(ledger)}


def _closed_form() -> Entries:
    inputs, targets = digits()
    plan = _plan(hush.Linf(0.1), hush.Truncated(scale=1.0, bound=2.0), hush.FullBatch())
    descent = LinearDescent(
        inputs.flatten(1), targets, plan, classes=CLASSES, lr=4.0, generator=seeded()
    )
    *_, weights = descent.run(steps=_STEPS)
    return {**entries("weights", weights), **_charges(descent.ledger)}


def _statistics() -> Entries:
    inputs, ledger = digits()[0], hush.Ledger()
    whiten = NoisyWhitening(multiplier=4.0, norm=8.0, square_norm=8.0)
    norms = inputs.flatten(1).norm(dim=1, keepdim=True)
    quantile = NoisyQuantile(multiplier=2.0)
    return {
        **entries("whitened", whiten(inputs, ledger, generator=seeded())(inputs)),
        **entries("quantile", quantile(norms, 0.5, ledger, generator=seeded())),
        **_charges(ledger),
    }


def _weights(model: nn.Module) -> Entries:
    return entries("weights", model.state_dict())


def _charges(ledger: hush.Ledger) -> Entries:
    """The charges of a ledger without the names of its runs, which are drawn anew."""
    return {
        **entries("releases", ledger.releases),
        **entries("counts", {plan.digest: count for plan, count in ledger.counts.items()}),
        **entries("epsilon", ledger.epsilon(_DELTA)),
    }


_GAUSSIAN = hush.Gaussian(2.0)
RUNS: dict[str, Callable[[], Entries]] = {
    "trained linear": _trained,
    "wide linear": partial(_stepped, wide, _plan(hush.L2(1.0), _GAUSSIAN)),
    "mlp, Linf, Rectified": partial(
        _stepped, mlp, _plan(hush.Linf(0.1), hush.Rectified(scale=1.0, bound=2.0))
    ),
    "cnn, Twice, L2Linf, views": partial(
        _stepped,
        cnn,
        _plan(hush.L2Linf(l2=1.0, linf=0.1), _GAUSSIAN, _TWICE),
        views=flips_and_shifts(2, shift=1),
    ),
    "cnn, Linf, Quantized, Adam": partial(
        _stepped,
        cnn,
        _plan(hush.Linf(0.1), hush.Quantized(scale=1.0, bound=2.0, levels=16)),
        optimizer=torch.optim.Adam,
        execution=hush.Execution(physical_batch=7),
    ),
    "lstm, L1, Laplace": partial(
        _stepped, lstm, _plan(hush.Lp(p=1.0, norm=5.0), hush.Laplace(2.0)), tokens
    ),
    "transformer, Lp, GeneralizedGaussian": partial(
        _stepped,
        transformer,
        _plan(hush.Lp(p=1.5, norm=2.0), hush.GeneralizedGaussian(beta=1.5, multiplier=2.0)),
        tokens,
    ),
    "transformer, Importance": partial(
        _stepped, transformer, _plan(hush.Importance(1.0), _GAUSSIAN), tokens
    ),
    "mlp, Coordinate, Principal, BlockGaussian": partial(
        _stepped,
        mlp,
        _plan(
            hush.Subspaces(
                ranks=[4, 456], l2=[1.0, 0.5], linf=[0.5, 0.1], bases=hush.Principal(groups=1, every=2)
            ),
            hush.BlockGaussian(multipliers=[2.0, 3.0]),
            hush.Coordinate(rate=0.5),
        ),
        public=public(),
    ),
    "mlp, FullBatch, Box, BlockGaussian": partial(
        _stepped,
        mlp,
        _plan(
            hush.Box(bounds=[(60, 0.2), (400, 0.1)]),
            hush.BlockGaussian(multipliers=[2.0, 3.0]),
            hush.FullBatch(),
        ),
    ),
    "mlp, Selective summed": partial(
        _stepped,
        mlp,
        _plan(
            hush.L2(1.0),
            _GAUSSIAN,
            release=hush.Selective(rate=0.5, clip=0.1, multiplier=2.0, threshold=-2.0, test="summed"),
        ),
    ),
    "linear, Selective mean per acceptance": partial(
        _stepped,
        linear,
        _plan(
            hush.L2(1.0),
            _GAUSSIAN,
            release=hush.Selective(
                rate=0.5,
                clip=0.1,
                multiplier=2.0,
                threshold=0.0,
                accounting="per-acceptance",
                test="mean",
            ),
        ),
    ),
    "linear, StochasticSign": partial(
        _stepped, linear, _plan(hush.L2(1.0), hush.StochasticSign(scale=2.0))
    ),
    "adaptive descent": _adaptive,
    "closed-form linear, Truncated": _closed_form,
    "whitening and quantile": _statistics,
}


def run(name: str) -> Entries:
    """The entries of one run, on one thread: sums are otherwise split by how many there are."""
    with _one_thread():
        return {f"run {name}: {key}": text for key, text in RUNS[name]().items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
