"""Canaries that own several records: found as far as one owner's charge allows, unless it is broken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.accounting.pld import analytic_gaussian
from hush.audit.canaries import CanaryRun, run_with_canaries
from hush.audit.lower_bound import CanaryBound, many_runs, one_run
from hush.core.parts import Sampling
from tests.audit import test_canaries
from tests.recipes.audit import sabotage, sabotage_units

DELTA, ORDINARY = 1e-5, [i // 2 for i in range(20)]
UNITS = 10
"""Owners of the ordinary records, two each."""


def plan_of(multiplier: float, sampling: Sampling | None = None) -> hush.Plan:
    return sabotage.plan_of(sampling or hush.FullBatch(), noise=hush.Gaussian(multiplier))


def planted(
    plan: hush.Plan, *, canaries: int, per_unit: int = 2, **options: Any
) -> tuple[CanaryRun, Tensor]:
    settings: dict[str, Any] = {
        "others": False,
        "physical_batch": 2000,
        "classes": max(5, canaries // 10),
    }
    settings["units"] = hush.Units(owners=ORDINARY, per_unit=per_unit)
    return test_canaries.planted(plan, canaries=canaries, **{**settings, **options})


def planted_records(
    plan: hush.Plan, *, steps: int, canaries: int, owned: int, per_unit: int, scale: float = 10.0
) -> tuple[CanaryRun, Tensor]:
    """A run with records for canaries: those of one owner are alike, and move weights of their own."""
    model = nn.Linear(canaries, 2, bias=False)
    nn.init.zeros_(model.weight)
    included = torch.rand(canaries, generator=torch.Generator().manual_seed(2)) < 0.5
    own = scale * torch.eye(canaries).repeat_interleave(owned, 0), torch.zeros(canaries * owned).long()
    run = run_with_canaries(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        (torch.zeros(20, canaries), torch.zeros(20).long()),
        own,
        included,
        steps=steps,
        delta=DELTA,
        generator=torch.Generator().manual_seed(3),
        units=hush.Units(owners=ORDINARY, per_unit=per_unit),
        owned=owned,
    )
    return run, included


def found(planted_run: tuple[CanaryRun, Tensor]) -> tuple[float, CanaryBound]:
    """Charge of one owner, and what the canaries found."""
    run, included = planted_run
    return run.charge.epsilon.upper, one_run(run.scores, included, delta=DELTA)


@pytest.mark.parametrize("gradient", ["mean", "sum"])
@pytest.mark.parametrize("physical", [1, 7, 2000])
def test_an_owner_who_is_in_moves_the_sum_by_the_clipping_norm_once(
    gradient: Any, physical: int
) -> None:
    """Without noise to speak of, each score is 1 or 0 over the number of owners, times the steps."""
    run, included = planted(
        plan_of(1e-6),
        steps=3,
        canaries=24,
        owned=5,
        units=hush.Units(owners=ORDINARY, per_unit=3, gradient=gradient),
        physical_batch=physical,
    )
    expected = included.double() * 3 / (UNITS + 24)
    torch.testing.assert_close(run.scores, expected, atol=1e-6, rtol=1e-4)
    assert run.charge.unit == "one user, at most 3 records a step"
    assert run.charge.records == UNITS + 24


def test_strong_canaries_find_much_of_the_charge_and_no_more() -> None:
    settings = {"canaries": 1500, "owned": 5, "per_unit": 2}
    charge, bound = found(planted(plan_of(2.0, hush.Poisson(0.8)), steps=16, **settings))
    assert 0.3 * charge < bound.epsilon <= charge
    run, included = planted(plan_of(2.0), steps=4, **settings)
    charge = run.charge.epsilon.upper
    assert charge == pytest.approx(analytic_gaussian.epsilon(1.0, DELTA).upper)
    # each has a coordinate and noise of its own, and takes part in every step: runs side by side
    normal = many_runs(run.scores[included], run.scores[~included], delta=DELTA)
    assert 0.6 * charge < normal.gaussian_epsilon <= charge


RARE = plan_of(1.0, hush.Poisson(0.05))


@pytest.mark.parametrize("kind", [planted, planted_records], ids=["directions", "records"])
@pytest.mark.parametrize(
    ("plan", "settings", "broken"),
    [
        # one of 40 records is drawn with a chance of .87 at a rate of .05
        (
            RARE,
            {"steps": 10, "canaries": 300, "owned": 40, "per_unit": 2},
            sabotage_units.records_drawn_instead_of_units,
        ),
        # eight norms under noise that is charged for one
        (
            plan_of(4.0),
            {"steps": 1, "canaries": 300, "owned": 8, "per_unit": 8},
            sabotage_units.records_clipped_one_by_one,
        ),
    ],
    ids=["drawn", "clipped"],
)
def test_owners_of_many_records_find_out_that_records_are_drawn_or_clipped(
    kind: Callable[..., tuple[CanaryRun, Tensor]],
    plan: hush.Plan,
    settings: dict[str, int],
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charge, bound = found(kind(plan, **settings))
    assert bound.epsilon <= charge
    broken(monkeypatch)
    claimed, bound = found(kind(plan, **settings))
    assert claimed == charge
    assert bound.epsilon > 1.5 * charge
