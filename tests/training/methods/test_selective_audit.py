"""A small audit of trials: what an attacker gains stays below the charge, unless momentum is kept."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import hush
from hush.training.rehearsal import Snapshot

TRIALS, REPEATS, DELTA = 100, 120, 0.05
NOISE, THRESHOLD = 3.0, 2.3
# Hardly any test batch has a record in it, and about one trial in 44 is accepted.
PLAN = hush.Plan(
    sampling=hush.FullBatch(),
    clipping=hush.L2(norm=1.0),
    noise=hush.Gaussian(multiplier=NOISE),
    release=hush.Selective(rate=1e-9, clip=1e-3, multiplier=10.0, threshold=-40.0, test="mean"),
)


def released(present: bool, seed: int) -> float:
    """The evidence in a run's verdicts and weights for a record that pulls the weight upward."""
    inputs = torch.zeros(3, 1)
    inputs[2] = 1.0 if present else 0.0
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    step = hush.PrivateStep(
        model,
        lambda outputs, targets: -outputs[:, 0],
        torch.optim.SGD(model.parameters(), lr=3.0, momentum=1.0),  # lr undoes the divisor
        PLAN,
        records=3,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(2 * seed + present)),
        execution=hush.Execution(physical_batch=3),
    )
    evidence, last = 0.0, 0.0
    for number, batch in enumerate(step.batches((inputs, torch.zeros(3)), steps=TRIALS), start=1):
        if step(batch):
            weight = float(model.weight.detach())
            # under kept momentum an accepted step is the sum of all proposals so far
            evidence, last = (weight - last) / math.sqrt(number) / NOISE, weight
    return evidence


def lower_bound() -> float:
    """An epsilon at DELTA that the runs exceed, with 95% confidence (Clopper and Pearson)."""
    false = sum(released(False, seed) > THRESHOLD for seed in range(REPEATS))
    actual = sum(released(True, seed) > THRESHOLD for seed in range(REPEATS))
    lowest = stats.beta.ppf(0.025, actual, REPEATS - actual + 1) if actual else 0.0
    highest = stats.beta.ppf(0.975, false + 1, REPEATS - false)
    return math.log(max(1e-9, (lowest - DELTA) / highest))


def forgetful(snapshot: Snapshot, restore: object = Snapshot.restore) -> None:
    momentum = {key: dict(held) for key, held in snapshot.optimizer.state.items()}
    restore(snapshot)  # type: ignore[operator]
    snapshot.optimizer.state.update(momentum)


@pytest.mark.slow
def test_kept_momentum_is_caught_and_what_runs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    charged = hush.epsilon(PLAN, steps=TRIALS, delta=DELTA).epsilon.upper
    assert lower_bound() < charged
    monkeypatch.setattr(Snapshot, "restore", forgetful)
    assert lower_bound() > charged
