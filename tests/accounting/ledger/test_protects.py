"""What neighbours of a charge may differ in: one unit, and the same for every charge on a ledger."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hush
from hush.core.errors import InvalidValue, LedgerError
from hush.core.guarantee import Adjacency, Neighbours
from tests.accounting.ledger.charged import PLAN


@pytest.mark.parametrize(
    ("adjacency", "said"),
    [
        (Adjacency(group=3), r"ledger\.epsilon\(group=3\)"),
        ("zero-out", "must be an Adjacency, not a str"),
    ],
)
def test_a_charge_is_for_one_unit(path: Path, adjacency: Any, said: str) -> None:
    with hush.Ledger(path) as ledger:
        for ask in (ledger.check_adjacency, partial(ledger.charge, PLAN, run="r", step=1, release="x")):
            with pytest.raises(InvalidValue, match=said):
                ask(adjacency=adjacency)
        assert not ledger.counts


def test_another_number_of_records_a_step_is_refused_for_what_the_guarantee_names() -> None:
    ledger = hush.Ledger()
    ledger.charge(PLAN, run="r", step=1, release="x", adjacency=Adjacency(per_unit=2))
    with pytest.raises(LedgerError, match=r"names one number of records a step\. Pass per_unit=2") as k:
        ledger.check_adjacency(Adjacency(per_unit=3))
    assert "add up" not in str(k.value)
    for other in (
        Adjacency(),
        Adjacency(per_unit="all"),
        Adjacency(per_unit=2, neighbours=Neighbours.REPLACE),
    ):
        with pytest.raises(LedgerError, match="do not add up"):
            ledger.check_adjacency(other)
