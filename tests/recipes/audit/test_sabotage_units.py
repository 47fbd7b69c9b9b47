"""Steps that protect owners, or whose length is private: each check and the self-test, sound and broken.

The power of each check here is 1, or above .999999 (docs/results/audit.md).
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.core.parts import Release
from hush_recipes.audit.draws import Check, batch_of_units, draws_independent, fresh_test_batches
from hush_recipes.audit.noise import noise_at_any_size, noise_scale, observe
from hush_recipes.audit.self_test import influence, length_hidden, self_test
from tests.recipes.audit import sabotage, sabotage_units
from tests.recipes.audit.sabotage import Sabotage, plan_of
from tests.recipes.audit.test_sabotage import MOMENTUM, name
from tests.training import helpers

OWNERS = [owner for owner in range(30) for _ in range(1 + owner % 4)]
ROWS, PER_UNIT = len(OWNERS), 3
UNITS = hush.Units(owners=OWNERS, per_unit=PER_UNIT)
SELECTIVE = hush.Selective(rate=0.5, clip=1e-2, multiplier=1.0, threshold=0.0, test="mean")
Data = tuple[Tensor, Tensor]


def records(rows: int = ROWS) -> Data:
    source = torch.Generator().manual_seed(0)
    return 3 * torch.randn(rows, 8, generator=source), torch.arange(rows) % 5


def step_of(seed: int = 0, release: Release | None = None, **options: Any) -> hush.PrivateStep:
    """A step on owners of one to four records, in physical batches that few of them fit into."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 5))
    settings = {"units": UNITS, "execution": hush.Execution(physical_batch=8), **options}
    return helpers.step_of(model, plan_of(release=release), make=MOMENTUM, seed=seed, **settings)


def one_owner(step: hush.PrivateStep) -> Check:
    batch = batch_of_units(step, 6, records(), 30)
    return influence(step, batch, places=(0, 5))


def in_small_batches(step: hush.PrivateStep) -> Check:
    batch = batch_of_units(step, 2, records(), 2)
    return influence(step, batch, lengths=(1e4,))


PRIVATE_LENGTH: dict[str, Any] = {"neighbours": hush.Neighbours.ADD_REMOVE, "records": 31}
OF_RECORDS: dict[str, Any] = {"units": None}
CHECKS: dict[str, Callable[[int], Check]] = {
    "draws": lambda seed: draws_independent(step_of(seed), records(), 100),
    "draws of tests": lambda seed: fresh_test_batches(step_of(seed, SELECTIVE), records(), 100),
    "scale": lambda seed: noise_scale(observe(step_of(seed), records(), 16)),
    "sizes": lambda seed: noise_at_any_size(step_of(seed), records(), repeats=2),
    "one owner": lambda seed: one_owner(step_of(seed)),
    "small batches": lambda seed: in_small_batches(step_of(seed)),
    "length": lambda seed: length_hidden(step_of(seed, **PRIVATE_LENGTH), records()),
    "length of records": lambda seed: length_hidden(
        step_of(seed, **PRIVATE_LENGTH, **OF_RECORDS), records()
    ),
}
CAUGHT: list[tuple[Sabotage, str]] = [
    (sabotage_units.records_drawn_instead_of_units, "draws"),
    (sabotage_units.records_drawn_instead_of_units, "draws of tests"),
    (sabotage_units.more_records_than_promised, "draws"),
    (sabotage.tested_on_the_training_batch, "draws of tests"),
    (sabotage_units.records_clipped_one_by_one, "one owner"),
    (sabotage_units.an_absent_unit_that_counts, "one owner"),
    (sabotage_units.units_cut_at_physical_batches, "small batches"),
    (sabotage_units.divided_by_the_number_of_rows, "scale"),
    (sabotage_units.rows_for_the_number_of_units, "scale"),
    (sabotage.divided_by_who_came, "sizes"),
    (sabotage_units.rows_for_the_number_of_units, "length"),
    (sabotage_units.rows_for_the_number_of_units, "length of records"),
    (sabotage_units.divided_by_the_number_of_rows, "length"),
]


@functools.cache
def unbroken(check: str) -> Check:
    return CHECKS[check](0)


@pytest.mark.filterwarnings("ignore::hush.core.errors.PrivacyWarning")
@pytest.mark.parametrize(("broken", "check"), CAUGHT, ids=name)
def test_it_is_caught(broken: Sabotage, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unbroken(check).passed
    broken(monkeypatch)
    assert not CHECKS[check](1).passed


def test_records_clipped_apart_are_caught_where_they_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of an owner whose gradients cancel move the sum little, however they are clipped."""
    step = step_of(units=hush.Units(owners=[0, 0], per_unit=2))
    data = torch.randn(1, 8).repeat(2, 1), torch.tensor([0, 1])
    step.model[0] = nn.Identity()  # type: ignore[operator]
    with torch.no_grad():
        step.model[1].weight.zero_()  # type: ignore[index]
        step.model[1].bias.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0, -9.0]))  # type: ignore[index]
    step.adopt_weights()
    batch = batch_of_units(step, 1, data, 2)
    sabotage_units.records_clipped_one_by_one(monkeypatch)
    assert float(step.clipped_sum(batch).norm()) < 0.1
    assert not influence(step, batch).passed


STEPS: dict[str, dict[str, Any]] = {
    "owners": {},
    "owners, selective": {"release": SELECTIVE},
    "owners, sum of gradients, length private": {
        **PRIVATE_LENGTH,
        "units": replace(UNITS, gradient="sum"),
    },
    "records, length private": {**PRIVATE_LENGTH, **OF_RECORDS, "records": 70},
}


@pytest.mark.filterwarnings("ignore::hush.core.errors.PrivacyWarning")
@pytest.mark.parametrize("case", STEPS)
def test_the_self_test_passes_and_leaves_no_trace(case: str) -> None:
    step = step_of(**STEPS[case])
    state = copy.deepcopy(step.state_dict())
    self_test(step, records())
    assert torch.equal(step.state_dict()["generator"], state["generator"])
    assert not step.ledger.counts


@pytest.mark.filterwarnings("ignore::hush.core.errors.PrivacyWarning")
@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (sabotage_units.records_drawn_instead_of_units, "owners"),
        (sabotage_units.units_cut_at_physical_batches, "owners"),
        (sabotage_units.rows_for_the_number_of_units, "owners, sum of gradients, length private"),
        # their checks are tried above: here, whether the self-test runs them
        pytest.param(sabotage_units.records_clipped_one_by_one, "owners", marks=pytest.mark.slow),
        pytest.param(sabotage_units.more_records_than_promised, "owners", marks=pytest.mark.slow),
        pytest.param(sabotage_units.divided_by_the_number_of_rows, "owners", marks=pytest.mark.slow),
    ],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_the_self_test_stops_what_is_not_as_charged(
    broken: Sabotage, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(1, **STEPS[case])
    broken(monkeypatch)
    with pytest.raises(Unsupported, match="violates its guarantee"):
        self_test(step, records())
    assert not step.ledger.counts
