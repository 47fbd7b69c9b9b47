"""Charges of plans with a period: one charge covers several consecutive steps of a run."""

from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn

import hush
from hush.accounting.epsilon import charged_steps
from hush.core.errors import Unproved
from tests.accounting.charged import PLAN, charge, counts

CYCLE = 4
CYCLIC = hush.Plan(
    sampling=hush.CyclicPoisson(rate=0.1, cycle=CYCLE),
    clipping=hush.L2(1.0),
    noise=hush.Gaussian(1.0),
)


def charges(path: Path) -> int:
    return charged_steps(CYCLIC, counts(path)[CYCLIC])


@pytest.mark.parametrize("steps", [1, 4, 5, 8, 11])
def test_a_run_costs_what_its_periods_cost_as_poisson_steps(steps: int) -> None:
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    theirs.compose(event, -(-steps // CYCLE))
    found = hush.epsilon(CYCLIC, steps, 1e-5).epsilon
    assert found.lower <= theirs.get_epsilon(1e-5) * (1 + 1e-3)
    assert found.upper == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    correlated = replace(CYCLIC, noise=hush.Banded(multiplier=1.0, strategy=(1.0, 0.5, 0.3, 0.2)))
    bound = hush.epsilon(correlated, steps, 1e-5).epsilon
    assert (bound.lower, bound.upper) == (0.0, found.upper), "the last columns may be cut"


def test_an_unfinished_period_has_no_lower_bound(tmp_path: Path) -> None:
    assert hush.epsilon(CYCLIC, 2 * CYCLE, 1e-5).epsilon.lower > 0
    assert hush.epsilon(CYCLIC, 2 * CYCLE - 1, 1e-5).epsilon.lower == 0
    path = tmp_path / "ledger.jsonl"
    for last, ended in ((CYCLE - 1, False), (CYCLE, True)):
        charge(path, CYCLIC, range(1 if not ended else CYCLE, last + 1))
        with hush.Ledger(path) as ledger:
            assert (ledger.epsilon(1e-5).epsilon.lower > 0) == ended
    # half a cycle in each of two runs: no record took part twice, and two cycles are charged
    charge(tmp_path / "two.jsonl", CYCLIC, range(1, 3))
    charge(tmp_path / "two.jsonl", CYCLIC, range(3, 5), run="s")
    with hush.Ledger(tmp_path / "two.jsonl") as ledger:
        found = ledger.epsilon(1e-5).epsilon
    assert (found.lower, found.upper) == (0, hush.epsilon(CYCLIC, 2 * CYCLE, 1e-5).epsilon.upper)


@pytest.mark.parametrize("last", range(1, 14))
def test_a_run_is_charged_once_per_period(tmp_path: Path, last: int) -> None:
    path = tmp_path / "ledger.jsonl"
    charge(path, CYCLIC, range(1, last + 1))
    assert charges(path) == -(-last // CYCLE)


def test_a_second_run_begins_a_new_period(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    charge(path, CYCLIC, range(1, 6))
    charge(path, CYCLIC, range(1, 2), run="s")
    assert charges(path) == 3
    charge(path, CYCLIC, range(7, 10), run="reseeded")  # within a period, up to the next one
    assert charges(path) == 5


def test_a_step_of_another_plan_ends_a_period(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    charge(path, CYCLIC, range(1, 3))
    charge(path, PLAN, range(3, 4))
    charge(path, CYCLIC, range(4, 5))
    assert (charges(path), counts(path)[PLAN]) == (2, 1)


@pytest.mark.parametrize("cut", [2, 40, 48, 60, 80])
@pytest.mark.parametrize("last", [5, 7])
def test_a_torn_charge_counts_a_period_until_it_is_repeated(tmp_path: Path, last: int, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    charge(path, CYCLIC, range(1, last + 1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert charges(path) >= 2
    charge(path, CYCLIC, range(last, last + 1))
    assert charges(path) == 2


def test_a_folded_ledger_continues_its_period(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        for step in range(1, 1003):
            ledger.charge(CYCLIC, run="r", step=step, release=f"{step:x}")
        ledger.compact("r", 1002)
    assert path.read_bytes().count(b"\n") < 10
    assert charges(path) == 251
    charge(path, CYCLIC, range(1003, 1005))
    assert charges(path) == 251
    charge(path, CYCLIC, range(1005, 1006))
    assert charges(path) == 252


@pytest.mark.parametrize(("taken", "last"), [(5, 6), (5, 8), (5, 9), (8, 9), (3, 12)])
def test_planned_steps_are_counted_in_periods(tmp_path: Path, taken: int, last: int) -> None:
    path = tmp_path / "ledger.jsonl"
    charge(path, CYCLIC, range(1, taken + 1))
    charge(path, CYCLIC, range(1, 2), run="s")
    with hush.Ledger(path) as ledger:
        ledger.charge_planned(CYCLIC, "r", last)
        assert ledger.unused("r") == -(-last // CYCLE) * CYCLE - taken
    assert charges(path) == 1 + -(-last // CYCLE)
    charge(path, CYCLIC, range(taken + 1, last + 1))
    assert charges(path) == 1 + -(-last // CYCLE)


def step_of(plan: hush.Plan, path: Path) -> hush.PrivateStep:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hush.PrivateStep(model, nn.MSELoss(), optimizer, plan, records=40, ledger=path)


DATA = torch.rand(40, 2), torch.rand(40, 1)


@pytest.mark.parametrize("taken", range(1, 9))
@pytest.mark.parametrize("reseed", [False, True])
def test_a_continued_run_ends_exactly_at_its_budget(tmp_path: Path, taken: int, reseed: bool) -> None:
    step = step_of(CYCLIC, tmp_path / "ledger.jsonl")
    for batch in step.batches(DATA, steps=taken):
        step(batch)
    if reseed:
        step.reseed()
    periods = 3 + (reseed and taken % CYCLE > 0)
    bound = hush.epsilon(CYCLIC, CYCLE * periods, 1e-5).epsilon.upper
    for batch in step.batches(DATA, budget=hush.Budget(epsilon=bound * 1.001, delta=1e-5)):
        step(batch)
    assert step.steps == 3 * CYCLE
    assert charged_steps(CYCLIC, step.ledger.counts[CYCLIC]) == periods
    assert step.spent(1e-5).epsilon.upper <= bound * 1.001


def test_calibration_counts_periods() -> None:
    budget = hush.Budget(epsilon=1.0, delta=1e-5)
    found = hush.calibrate(CYCLIC, budget, steps=100)
    poisson = hush.calibrate(hush.plans.dpsgd(rate=0.1, multiplier=1.0), budget, steps=25)
    assert found.noise == poisson.noise
    spent = hush.calibrate(CYCLIC, budget, steps=90, spent={found: 8})
    assert spent.noise != found.noise


def test_relations_without_a_proof_raise() -> None:
    with pytest.raises(Unproved, match="depends on its slot"):
        hush.epsilon(CYCLIC, 4, 1e-5, neighbours=hush.Neighbours.ADD_REMOVE)
    with pytest.raises(Unproved, match="2 slots that change together"):
        hush.epsilon(CYCLIC, 4, 1e-5, group=2)
    hush.epsilon(CYCLIC, 4, 1e-5, neighbours=hush.Neighbours.REPLACE)
