"""Where a run ends: the budget in a custom loop, and runs that are stopped because of their results."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hush
from hush.accounting.ledger import Ledger
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.training.loop import Run
from tests.training import helpers
from tests.training.helpers import plan_of, randomness, step_of

RECORDS, DELTA = 40, 1e-5
PLAN = plan_of(hush.Poisson(0.25), noise=2.0)


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 3), (torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,)))


def cost(steps: int) -> float:
    return hush.epsilon(PLAN, steps, DELTA).epsilon.upper


def train(folder: Path | None = None, **options: Any) -> Run:
    model, data = problem()
    defaults: dict[str, Any] = {
        "steps": 30,
        "every": 10,
        "directory": folder,
        "randomness": randomness(1),
    }
    defaults["budget"] = hush.Budget(epsilon=50.0, delta=DELTA)
    return helpers.train(model, PLAN, data, **{**defaults, **options})


def test_a_custom_loop_ends_before_the_step_that_would_go_over() -> None:
    budget = hush.Budget(epsilon=(cost(7) + cost(8)) / 2, delta=DELTA)
    model, data = problem()
    step = step_of(model, PLAN, records=RECORDS)
    for batch in step.batches(data, budget=budget):
        assert step.planned == 7
        step(batch)
    assert step.steps == 7
    assert step.spent().epsilon.upper == cost(7) <= budget.epsilon  # at the budget's delta
    with pytest.raises(BudgetExceeded, match=r"below the cost of one step|more than the budget"):
        step.batches(data, budget=hush.Budget(epsilon=cost(7) / 2, delta=DELTA))
    with pytest.warns(UserWarning, match="the run ends after 7 of steps=9"):
        assert list(step.batches(data, steps=2, budget=budget)) == []


def test_steps_within_the_budget_are_all_taken() -> None:
    model, data = problem()
    step = step_of(model, PLAN, records=RECORDS)
    for batch in step.batches(data, steps=5, budget=hush.Budget(epsilon=cost(8), delta=DELTA)):
        step(batch)
    assert (step.steps, step.planned) == (5, 5)


@pytest.mark.parametrize("verdict", [True, np.bool_(True), torch.tensor(True)])
@pytest.mark.parametrize("end", [10, 13])
def test_a_callback_ends_the_run_and_all_planned_steps_stay_charged(
    tmp_path: Path, verdict: Any, end: int
) -> None:
    seen = []

    def on_step(number: int, metrics: Any) -> Any:
        seen.append(number)
        return verdict if number == end else "a value of a logger"

    run = train(tmp_path / "run", callbacks=[on_step])
    assert (seen[-1], run.steps, run.stopped) == (end, end, "callback")
    assert run.metrics[-1]["step"] == end
    assert run.guarantee.epsilon.upper == cost(30) > cost(end)
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True)
    assert ledger.epsilon().epsilon.upper == cost(30)


def test_a_stopped_run_that_continues_uses_up_its_planned_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, callbacks=[lambda number, _: number == 10])
    for steps in (20, 30):
        run = train(folder, resume=True, steps=steps)
        assert (run.steps, run.guarantee.epsilon.upper) == (steps, cost(30))
    assert train(folder, resume=True, steps=31).guarantee.epsilon.upper == cost(31)


def test_a_stopped_run_ends_where_a_run_without_the_stop_would(tmp_path: Path) -> None:
    """The planned steps of a stopped run leave the rest of its budget, and no more, to another run."""
    folder, budget = tmp_path / "run", hush.Budget(epsilon=cost(12) * 1.001, delta=DELTA)
    with Ledger(folder) as ledger:
        first = train(budget=budget, steps=8, ledger=ledger, callbacks=[lambda number, _: number == 2])
        assert (first.steps, first.guarantee.epsilon.upper) == (2, cost(8))
    with Ledger(folder) as ledger:
        second = train(budget=budget, steps=None, ledger=ledger)
        assert (second.steps, second.guarantee.epsilon.upper) == (4, cost(12))


def test_the_planned_steps_survive_folding(tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    with Ledger(file) as ledger:
        for number in range(1, 1500):
            ledger.charge(PLAN, run="a", step=number, release=f"{number}")
        ledger.charge_planned(PLAN, "a", 2000)
        ledger.compact("a", 1499)
    with Ledger(file) as ledger:
        assert (dict(ledger.counts), ledger.unused("a")) == ({PLAN: 2000}, 501)
        ledger.charge(PLAN, run="a", step=1500, release="b")
        assert (dict(ledger.counts), ledger.unused("a")) == ({PLAN: 2000}, 500)
        ledger.charge(PLAN, run="b", step=1, release="b")
        assert dict(ledger.counts) == {PLAN: 2001}


def test_a_custom_loop_is_stopped_by_its_results() -> None:
    model, data = problem()
    step = step_of(model, PLAN, records=RECORDS)
    for batch in step.batches(data, steps=30):
        step(batch)
        if step.steps == 4:
            step.stop()
            break
    assert step.spent(DELTA).epsilon.upper == cost(30)
    unlimited = step_of(model, PLAN, records=RECORDS, ledger=step.ledger)
    next(unlimited.batches(data))
    with pytest.raises(InvalidValue, match="no planned number of steps"):
        unlimited.stop()


def test_a_stop_is_a_function_of_the_planned_releases() -> None:
    """The exact law of a stopped run: its delta at the planned epsilon is covered, at a step's is not.

    Two releases N(0, 1) or N(1, 1); the run stops after the first one if it looks as without the
    record. Quoting one step for the runs that stop and two for the others is not a guarantee.
    """
    from scipy.stats import norm

    two = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    epsilon = 1.0
    grid = np.linspace(-9, 10, 40_001)
    width, first = grid[1] - grid[0], grid
    stays = first > 0.5
    p, q = norm.pdf(first - 1), norm.pdf(first)
    loss = first - 0.5  # log p / q of one release
    stopped = (p - np.exp(epsilon) * q)[~stays].clip(0).sum() * width
    # P(loss + loss2 > epsilon) - e^epsilon Q(...), given the first release
    above = (epsilon - loss) + 0.5
    continued = (p * norm.sf(above - 1) - np.exp(epsilon) * q * norm.sf(above))[stays].sum() * width
    delta = stopped + continued
    planned = hush.accounting.epsilon.delta({two: 2}, epsilon)
    one = hush.accounting.epsilon.delta({two: 1}, epsilon)
    assert one.upper < delta <= planned.upper
