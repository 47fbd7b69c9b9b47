"""A rank that is killed between the charge of a step and its update: the others stop, charged."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hush
from tests.training.distributed import spawned
from tests.training.distributed.problems import data_of, seeded, step_of, weights_of


def dies_after_the_second_charge(folder: Path, *, rank: int) -> None:
    """One of two ranks is gone once rank 0 has synced the charge of step 2; the other goes on."""
    step = step_of(ledger=folder / "ledger.jsonl", randomness=hush.Randomness(generator=seeded()))
    batches = step.batches(data_of(), steps=3)
    step(next(batches))
    torch.save(weights_of(step.model), folder / f"after one step {dist.get_rank()}.pt")
    if dist.get_rank() == rank == 0:
        charged = hush.Ledger.charge

        def dying(self: hush.Ledger, *plan: Any, **details: Any) -> None:
            charged(self, *plan, **details)
            os._exit(9)

        hush.Ledger.charge = dying  # type: ignore[method-assign]
    elif dist.get_rank() == rank:
        hush.Ledger.follow = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]
    try:
        for batch in batches:
            step(batch)
    except hush.errors.ProcessFailed as error:
        torch.save((str(error), weights_of(step.model)), folder / "left.pt")
        os._exit(0)


def first_dies(folder: Path) -> None:
    dies_after_the_second_charge(folder, rank=0)


def second_dies(folder: Path) -> None:
    dies_after_the_second_charge(folder, rank=1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("scenario", "survivor"), [(first_dies, 1), (second_dies, 0)])
def test_the_other_rank_stops_and_the_step_is_charged(scenario: spawned.Scenario, survivor: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        codes = spawned.start((scenario,), 2, folder, timeout=20.0)
        shared = Path(folder, scenario.__name__)
        text, weights = torch.load(shared / "left.pt")
        before = torch.load(shared / f"after one step {survivor}.pt")
        with hush.Ledger(shared / "ledger.jsonl") as ledger:
            charges = sum(ledger.counts.values())
    assert codes == ([9, 0] if survivor else [0, 9])
    assert charges == 2
    assert f"rank {survivor} of 2 cannot go on" in text
    assert "resume from the last checkpoint" in text
    if survivor:
        assert "Step 2 may be charged" in text
        assert torch.equal(weights, before), "it never heard of the charge"
    else:
        assert "Step 2 is on the ledger" in text
