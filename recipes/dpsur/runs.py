"""Training runs of the DPSUR paper's comparison: each method at one epsilon that holds.

Everything is charged on one ledger a run. "published" is the one exception: it stops once so many
updates are accepted as the paper's accounting allows, and says what its trials cost.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from hush.accounting import epsilon as charge
from hush.accounting.calibrate import calibrate, steps_within
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import L2, Importance
from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.methods.adaptive import Adaptive, AdaptiveDescent
from hush.training.step import PrivateStep
from recipes.dpsur.charged_statistics import Paid, normalised_by
from recipes.dpsur.inputs import at_hand, network

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 3.0, 4.0)
Four = tuple[float, float, float, float]
Kind = Literal["plain", "importance", "adaptive", "summed", "mean", "published"]
# Trials of a published run for each update that it is to accept; beyond, it is given up.
_MOST_TRIALS = 10


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method on a network, with what it is run with at epsilon 1, 2, 3 and 4."""

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
    paid: Paid | None = None
    """Statistics of the inputs that are paid for and normalised by."""
    statistics_noise: float = 8.0
    """Theirs; the paper's by default."""
    adam: bool = False
    relu: bool = False
    printed: Four | None = None
    """What the paper's Table 2 says, in percent."""
    quick: bool = False
    """Whether a CPU does it in a minute or so."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run reached."""

    accuracy: float
    sound: float
    published: float | None = None
    trials: int | None = None
    accepted: int | None = None


def run(way: Way, data: str, level: float, seed: int, device: str, epochs: int | None) -> Outcome:
    """One training run of a method at an epsilon."""
    if level not in EPSILONS:
        raise InvalidValue(f"epsilon {level:g} is not in the table: choose from 1, 2, 3, 4.")
    if way.paid is not None and (way.noise is not None or way.kind == "adaptive"):
        raise InvalidValue(
            f"{way.name}: statistics are paid for by more noise in training, and here that is fixed, or "
            "the method's own. Leave out one of the two."
        )
    inputs = at_hand(data, way.model.startswith("scattering"), device)
    torch.manual_seed(seed)
    model = network(way.model, inputs, relu=way.relu).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    budget = Budget(epsilon=level, delta=DELTA)
    rate = way.rates[EPSILONS.index(level)]
    loss = nn.CrossEntropyLoss()
    if way.kind == "adaptive":
        settings = Adaptive(clip=way.clip, longest=rate)
        descent = AdaptiveDescent(model, loss, inputs.train, budget, settings, generator=generator)
        for _ in descent.run():
            pass
        accuracy = evaluate(model, loss, inputs.test)["accuracy"]
        return Outcome(accuracy=accuracy, sound=descent.spent(DELTA).epsilon.upper)

    ledger = Ledger()
    if way.paid is not None:
        inputs = normalised_by(way.paid, way.statistics_noise, inputs, ledger, seed)
    steps = max(1, (epochs or way.epochs) * inputs.records // way.batch)
    plan = plan_for(way, inputs.records, level)
    most, wanted = steps, -1
    if way.noise is None:
        plan = calibrated(plan, budget, steps, frozenset(ledger.counts.items()))
    else:
        allowed = _within(said(plan) if way.kind == "published" else plan, budget)
        most, wanted = (_MOST_TRIALS * allowed, allowed) if way.kind == "published" else (allowed, -1)
        most = min(most, steps) if epochs else most
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if way.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    step = PrivateStep(
        model,
        loss,
        optimizer,
        plan,
        records=inputs.records,
        ledger=ledger,
        generator=generator,
        # most of these networks are so small that a GPU waits for Python
        replay=device != "cpu" and way.kind != "importance",
    )
    for batch in step.batches(inputs.train, steps=most):
        step(batch)
        if step.accepted == wanted:
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
    return replace(outcome, published=charge.epsilon(said(plan), step.accepted, DELTA).epsilon.upper)


def outcomes(cell: tuple[Way, str, float, int, str, int | None]) -> list[Outcome]:
    """What the runs of one method at one epsilon reached, a seed each."""
    way, data, level, seeds, device, epochs = cell
    return [run(way, data, level, seed, device, epochs) for seed in range(seeds)]


def plan_for(way: Way, records: int, level: float) -> Plan:
    """The plan of a method; noise that is to be found is 1."""
    place = EPSILONS.index(level)
    plan = Plan(
        sampling=Poisson(rate=way.batch / records),
        clipping=Importance(norm=way.clip) if way.kind == "importance" else L2(norm=way.clip),
        noise=Gaussian(multiplier=1.0 if way.noise is None else way.noise[place]),
    )
    if way.kind not in ("summed", "mean", "published"):
        return plan
    release = Selective(
        rate=way.test_batch / records,
        clip=way.test_clip,
        multiplier=way.test_noise[place],
        threshold=way.threshold,
        test="summed" if way.kind == "summed" else "mean",
    )
    return replace(plan, release=release)


def said(plan: Plan) -> Plan:
    """The plan as the paper charges it, by accepted updates alone; no guarantee."""
    assert isinstance(plan.release, Selective)
    return replace(plan, release=replace(plan.release, accounting="published"))


# The seeds of a method share their noise and their number of trials.
_within = lru_cache(maxsize=1)(steps_within)


@lru_cache(maxsize=1)
def calibrated(
    plan: Plan, budget: Budget, steps: int, spent: frozenset[tuple[Plan, int]] = frozenset()
) -> Plan:
    """`plan` with the least noise for which `steps` of it fit the budget after what was spent."""
    return calibrate(plan, budget, steps, spent=dict(spent))
