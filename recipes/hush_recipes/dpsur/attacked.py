"""Models that Tables 3 and 4 of the DPSUR paper attack: overfitted without privacy, or private."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from hush.accounting.calibrate import max_steps
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget
from hush.training.options import Randomness
from hush.training.step import PrivateStep
from hush_recipes.dpsur.inputs import Inputs, inputs_on, network
from hush_recipes.dpsur.methods import METHODS
from hush_recipes.dpsur.nonprivate import without_privacy
from hush_recipes.dpsur.runs import DELTA, EPSILONS, Method, calibrated, plan_for

Records = tuple[Tensor, Tensor]
PRIVATE = {"DP-SGD": "DPSGD-HF", "DPSUR": "DPSUR"}
"""The methods, and their names among those of Table 2."""
# A third of all records, which the paper's batch sizes are out of.
_WHOLE = {"fashion-mnist": 23_332, "cifar10": 20_000}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a study: records, epochs, shadow models."""

    records: int | None
    """All that are split; None: all there are."""
    epsilons: tuple[float, ...]
    epochs: int
    plain_epochs: int
    """Of the models without privacy: long enough to memorise."""
    plain_batch: int
    shadows: int
    plain_shadows: int
    short: bool = False
    """Whether selective release, too, stops after the epochs; else it uses the whole budget."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the paper's table, one seed."""

    data: str
    method: str
    level: float | None
    seed: int
    device: str
    size: Size


@lru_cache(maxsize=1)
def pooled(data: str, device: str, records: int | None) -> tuple[Tensor, Tensor, int]:
    """Training and test records together, or a random `records` of them, on the device."""
    inputs = inputs_on(data, True, device)
    total = inputs.records + len(inputs.test[1])
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(0))[: records or total]
    chosen = chosen.to(inputs.train[1].device)
    training, test = chosen[chosen < inputs.records], chosen[chosen >= inputs.records] - inputs.records
    x, y = (torch.cat([a[training], b[test]]) for a, b in zip(inputs.train, inputs.test, strict=True))
    return x, y, inputs.classes


def picked(x: Tensor, y: Tensor, rows: Tensor) -> Records:
    """The records of these indices."""
    rows = rows.to(y.device)
    return x[rows], y[rows]


def trained(case: Case, classes: int, records: Records, number: int) -> tuple[nn.Module, float | None]:
    """A trained model of one method, and the epsilon it spent."""
    method = next(
        method for method in METHODS[case.data] if method.name == PRIVATE.get(case.method, "DPSGD-HF")
    )
    torch.manual_seed(1000 * case.seed + number)
    inputs = Inputs(classes=classes, train=records, test=records)
    model = network(method.model, inputs).to(case.device)
    if case.level is None:
        size = case.size
        plain = without_privacy(model, records, epochs=size.plain_epochs, batch=size.plain_batch)
        return plain, None
    return model, _privately(case, method, model, records, number)


def _privately(case: Case, method: Method, model: nn.Module, records: Records, number: int) -> float:
    """Train within epsilon as in Table 2, at the sampling rates of the paper's split of all records."""
    assert case.level is not None
    count = len(records[1])
    whole = _WHOLE.get(case.data, count)
    scaled = replace(
        method,
        batch=max(1, round(method.batch * count / whole)),
        test_batch=max(1, round(method.test_batch * count / whole)),
    )
    budget = Budget(epsilon=case.level, delta=DELTA)
    steps = max(1, case.size.epochs * count // scaled.batch)
    plan = plan_for(scaled, count, case.level)
    if method.noise is None:
        plan = calibrated(plan, budget, steps)
    else:
        allowed = max_steps(plan, budget)
        if not allowed:
            raise BudgetExceeded(f"{method.name}: epsilon {case.level:g} is below what one trial costs.")
        steps = min(steps, allowed) if case.size.short else allowed
    rate = method.rates[EPSILONS.index(case.level)]
    step = PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        plan,
        records=count,
        randomness=Randomness(
            generator=torch.Generator(case.device).manual_seed(1000 * case.seed + number)
        ),
    )
    for batch in step.batches(records, steps=steps):
        step(batch)
    return step.spent(DELTA).epsilon.upper
