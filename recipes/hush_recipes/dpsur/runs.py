"""Training runs of the DPSUR paper's comparison: each method at one epsilon that holds.

Everything is charged on one ledger a run. "published" is the one exception: it stops once as many
updates are accepted as the paper's accounting allows, and reports what its trials cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from hush.accounting import epsilon as charge
from hush.accounting.calibrate import calibrate, max_steps
from hush.accounting.ledger import Ledger
from hush.clipping import L2, Importance
from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.options import Randomness
from hush.training.step import PrivateStep
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent
from hush_recipes.dpsur.inputs import Statistics, inputs_on, network, normalised_by

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 3.0, 4.0)
Four = tuple[float, float, float, float]
Kind = Literal["plain", "importance", "adaptive", "summed", "mean", "published"]
# Trials of a published run for each update that it is to accept; beyond, it is given up.
_MOST_TRIALS = 10


def four(value: float) -> Four:
    """The same setting at every epsilon."""
    return (value, value, value, value)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method on a network, with its settings at epsilon 1, 2, 3 and 4."""

    name: str
    kind: Kind = "plain"
    model: str
    batch: int = 2048
    epochs: int = 40
    rates: Four
    """Learning rates; for the adaptive one, the longest step to begin with."""
    noise: Four | None = None
    """Training noise where it is the paper's; otherwise as little as the budget allows."""
    test_noise: Four = (8.0, 8.0, 8.0, 8.0)
    test_batch: int = 128
    test_clip: float = 0.01
    threshold: float = -1.0
    clip: float = 0.1
    paid: Statistics | None = None
    """Statistics of the inputs that are paid for and normalised by."""
    statistics_noise: float = 8.0
    """Theirs; the paper's by default."""
    adam: bool = False
    relu: bool = False
    printed: Four | None = None
    """Accuracies in the paper's Table 2, in percent."""
    quick: bool = False
    """Whether a CPU does it in a minute or so."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Accuracy and cost of one run."""

    accuracy: float
    sound: float
    published: float | None = None
    trials: int | None = None
    accepted: int | None = None


def check_levels(levels: Sequence[float]) -> None:
    """Raise unless the paper's table has all of these epsilons, for which there are settings."""
    for level in levels:
        if level not in EPSILONS:
            raise InvalidValue(f"epsilon {level:g} is not in the table: choose from 1, 2, 3, 4.")


def run(method: Method, data: str, level: float, seed: int, device: str, epochs: int | None) -> Outcome:
    """One training run of a method at an epsilon."""
    check_levels([level])
    if method.paid is not None and (method.noise is not None or method.kind == "adaptive"):
        raise InvalidValue(
            f"{method.name}: statistics are paid for by more noise in training, and here that is fixed, "
            "or the method's own. Leave out one of the two."
        )
    inputs = inputs_on(data, method.model.startswith("scattering"), device)
    torch.manual_seed(seed)
    model = network(method.model, inputs, relu=method.relu).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    budget = Budget(epsilon=level, delta=DELTA)
    rate = method.rates[EPSILONS.index(level)]
    loss = nn.CrossEntropyLoss()
    if method.kind == "adaptive":
        settings = Adaptive(clip=method.clip, longest=rate)
        descent = AdaptiveDescent(model, loss, inputs.train, budget, settings, generator=generator)
        for _ in descent.run():
            pass
        accuracy = evaluate(model, loss, inputs.test)["accuracy"]
        return Outcome(accuracy=accuracy, sound=descent.spent(DELTA).epsilon.upper)

    ledger = Ledger()
    if method.paid is not None:
        inputs = normalised_by(method.paid, method.statistics_noise, inputs, ledger, seed)
    steps = max(1, (epochs or method.epochs) * inputs.records // method.batch)
    plan = plan_for(method, inputs.records, level)
    trials, updates = steps, -1
    if method.noise is None:
        plan = calibrated(plan, budget, steps, frozenset(ledger.counts.items()))
    else:
        allowed = _allowed_steps(as_published(plan) if method.kind == "published" else plan, budget)
        trials, updates = (
            (_MOST_TRIALS * allowed, allowed) if method.kind == "published" else (allowed, -1)
        )
        trials = min(trials, steps) if epochs else trials
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if method.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    step = PrivateStep(
        model,
        loss,
        optimizer,
        plan,
        records=inputs.records,
        ledger=ledger,
        randomness=Randomness(generator=generator),
    )
    for batch in step.batches(inputs.train, steps=trials):
        step(batch)
        if step.accepted == updates:
            break
    outcome = Outcome(
        accuracy=evaluate(model, loss, inputs.test)["accuracy"],
        sound=step.spent(DELTA).epsilon.upper,
    )
    if not isinstance(plan.release, Selective):
        return outcome
    outcome = replace(outcome, trials=step.steps, accepted=step.accepted)
    if plan.release.test == "summed" or not step.accepted:
        return outcome
    return replace(
        outcome, published=charge.epsilon(as_published(plan), step.accepted, DELTA).epsilon.upper
    )


def outcomes(cell: tuple[Method, str, float, int, str, int | None]) -> list[Outcome]:
    """Outcomes of one method at one epsilon, a seed each."""
    method, data, level, seeds, device, epochs = cell
    return [run(method, data, level, seed, device, epochs) for seed in range(seeds)]


def plan_for(method: Method, records: int, level: float) -> Plan:
    """The plan of a method; noise that is to be calibrated is 1."""
    column = EPSILONS.index(level)
    plan = Plan(
        sampling=Poisson(rate=method.batch / records),
        clipping=Importance(norm=method.clip) if method.kind == "importance" else L2(norm=method.clip),
        noise=Gaussian(multiplier=1.0 if method.noise is None else method.noise[column]),
    )
    if method.kind not in ("summed", "mean", "published"):
        return plan
    release = Selective(
        rate=method.test_batch / records,
        clip=method.test_clip,
        multiplier=method.test_noise[column],
        threshold=method.threshold,
        test="summed" if method.kind == "summed" else "mean",
    )
    return replace(plan, release=release)


def as_published(plan: Plan) -> Plan:
    """The plan as the paper charges it, by accepted updates alone; no guarantee."""
    assert isinstance(plan.release, Selective)
    return replace(plan, release=replace(plan.release, accounting="published"))


# The seeds of a method share their noise and their number of trials.
_allowed_steps = lru_cache(maxsize=1)(max_steps)


@lru_cache(maxsize=1)
def calibrated(
    plan: Plan, budget: Budget, steps: int, spent: frozenset[tuple[Plan, int]] = frozenset()
) -> Plan:
    """`plan` with the least noise for which `steps` of it fit the budget after what was spent."""
    return calibrate(plan, budget, steps, spent=dict(spent))
