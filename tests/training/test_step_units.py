"""Steps that protect owners of several records: who is drawn, what one owner moves, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import CheckpointError, InvalidValue, LedgerError, Unproved, Unsupported
from tests.training import helpers
from tests.training.helpers import plan_of, run, train

OWNERS = ["a"] * 5 + ["b"] * 3 + ["c"] * 2 + ["d"] * 2 + ["e"] * 8
PLAN = plan_of(hush.Poisson(0.5), hush.L2(0.5), 1e-6)
RELEASE = hush.Selective(threshold=0.0, clip=1.0, multiplier=1.0, rate=0.5, accounting="per-trial")
SELECTIVE = replace(PLAN, noise=hush.Gaussian(1.0), release=RELEASE)


def records() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(len(OWNERS), 4), torch.randint(0, 3, (len(OWNERS),))


UNITS = hush.Units(owners=OWNERS, per_unit=2)


def step_of(
    plan: hush.Plan = PLAN, units: hush.Units | None = UNITS, **options: Any
) -> hush.PrivateStep:
    torch.manual_seed(0)
    return helpers.step_of(nn.Linear(4, 3), plan, seed=2, units=units, **options)


def test_a_step_draws_owners_and_few_records_of_each() -> None:
    step, sizes = step_of(), []
    assert step.records == 5
    for batch in step.batches(records(), steps=60):
        assert batch.counts is not None
        assert max(batch.counts.tolist(), default=0) <= 2
        parts = batch.indices.split(batch.counts.tolist())
        groups = [{OWNERS[slot] for slot in part.tolist()} for part in parts]
        assert all(len(group) == 1 for group in groups)
        assert len(set().union(*groups)) == len(batch)
        sizes.append(len(batch))
        step(batch)
    assert abs(sum(sizes) - 150) < 5 * (60 * 5 / 4) ** 0.5


@pytest.mark.parametrize("plan", [PLAN, SELECTIVE])
@pytest.mark.parametrize("physical", [1, 3])
def test_an_owner_who_is_absent_takes_away_one_clipped_gradient(plan: hush.Plan, physical: int) -> None:
    data = records()
    for owner in set(OWNERS):
        present = torch.tensor([name != owner for name in OWNERS])
        execution = hush.Execution(physical_batch=physical)
        whole, without = (step_of(plan, execution=execution) for _ in range(2))
        pairs = zip(
            whole.batches(data, steps=4), without.batches(data, steps=4, present=present), strict=True
        )
        with_it, moved = 0, 0
        for all_there, one_absent in pairs:
            assert all_there.indices.tolist() == one_absent.indices.tolist()
            drawn = owner in {OWNERS[slot] for slot in all_there.indices.tolist()}
            change = whole.clipped_sum(all_there) - without.clipped_sum(one_absent)
            assert float(change.norm()) <= 0.5 * (1 + 1e-6)
            assert (float(change.norm()) > 0.01) == drawn
            with_it, moved = with_it + drawn, moved + 1
            whole.pending_batch = without.pending_batch = None
            whole.steps = without.steps = moved


def test_the_update_is_the_mean_over_owners_of_the_mean_over_their_records() -> None:
    data = records()
    step = step_of(plan_of(clipping=hush.L2(1e3), noise=1e-9), units=replace(UNITS, per_unit=8))
    before = nn.Linear(4, 3)
    before.load_state_dict(step.model.state_dict())
    run(step, data)
    loss = torch.zeros(())
    for owner in "abcde":
        own = torch.tensor([name == owner for name in OWNERS])
        loss = loss + nn.functional.cross_entropy(before(data[0][own]), data[1][own]) / 5
    expected = torch.autograd.grad(loss, list(before.parameters()))
    assert step.update is not None
    flat = torch.cat([part.reshape(-1) for part in expected])
    torch.testing.assert_close(step.update.float(), flat, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"records": 20}, InvalidValue, "records=20, but there are 5 distinct user ids"),
        ({"units": replace(UNITS, per_unit=9)}, InvalidValue, "no user has more than 8"),
        ({"execution": hush.Execution(replay=True)}, Unsupported, "users have different numbers"),
        ({"neighbours": hush.Neighbours.ADD_REMOVE}, InvalidValue, "records was not passed"),
        ({"neighbours": "sideways"}, InvalidValue, "sideways"),
    ],
)
def test_bad_units_are_refused_before_anything_is_drawn(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        step_of(**options)


def test_a_run_resumes_with_the_same_owners_alone(tmp_path: Path) -> None:
    step = step_of(ledger=tmp_path / "ledger.jsonl")
    batches = step.batches(records())
    step(next(batches))
    state = step.state_dict()
    step.ledger.close()
    with pytest.raises(
        LedgerError, match=r"at most 2 .* at most 3 .* a ledger has one per_unit.* per_unit=2"
    ):
        step_of(ledger=tmp_path / "ledger.jsonl", units=replace(UNITS, per_unit=3))
    other = step_of(ledger=hush.Ledger(tmp_path / "ledger.jsonl"), units=replace(UNITS, gradient="sum"))
    with pytest.raises(CheckpointError, match="owners, per_unit or gradient"):
        other.load_state_dict(state)
    other.ledger.close()
    again = step_of(ledger=hush.Ledger(tmp_path / "ledger.jsonl"))
    again.load_state_dict(state)
    again(next(again.batches(records())))
    assert again.steps == 2


@pytest.mark.parametrize("relation", ["zero-out", "replace"])
def test_a_ledger_is_of_one_public_table_of_owners(relation: str, tmp_path: Path) -> None:
    """Five owners of four records each, and then a user of theirs would be four of the next run's."""
    path, fours, fives = tmp_path / "ledger.jsonl", [i // 4 for i in range(20)], [*range(5)] * 4
    step = run(step_of(units=replace(UNITS, owners=fours), neighbours=relation, ledger=path), records())
    step.ledger.close()
    with hush.Ledger(path) as ledger:
        with pytest.raises(
            LedgerError, match="the record-to-user maps differ, so one person may be several users"
        ):
            step_of(units=replace(UNITS, owners=fives), neighbours=relation, ledger=ledger)
        renamed = step_of(
            units=replace(UNITS, owners=[f"user {i}" for i in fours]), neighbours=relation, ledger=ledger
        )
        run(renamed, records())
        assert sum(ledger.counts.values()) == 2
        assert ledger.epsilon(1e-3, neighbours=hush.Neighbours.REPLACE).unit == step.adjacency.unit
        with pytest.raises(Unproved, match="not the charged relation"):
            ledger.epsilon(1e-3, neighbours=hush.Neighbours.ADD_REMOVE)


def test_nothing_of_the_owners_is_written_where_they_are_private(tmp_path: Path) -> None:
    def kept(owners: list[int], name: str) -> list[str]:
        units = replace(UNITS, owners=owners)
        step = step_of(units=units, neighbours="add/remove", records=5, ledger=tmp_path / name)
        run(step, records()).ledger.close()
        return [line for line in (tmp_path / name).read_text().splitlines() if "protects" in line]

    (fours,), (fives,) = kept([i // 4 for i in range(20)], "a"), kept([i % 5 for i in range(20)], "b")
    protects = [json.loads(line)["protects"] for line in (fours, fives)]
    assert protects[0] == protects[1] == {"neighbours": "add/remove", "per_unit": 2, "group": 1}


def test_training_protects_owners(tmp_path: Path) -> None:
    budget = hush.Budget(epsilon=3.0, delta=1e-2)
    plan = hush.calibrate(PLAN, budget, steps=5)
    options: dict[str, Any] = {
        "units": hush.Units(owners=OWNERS, per_unit=3),
        "directory": tmp_path / "run",
    }
    run = train(nn.Linear(4, 3), plan, records(), budget=budget, steps=5, **options)
    guarantee = run.guarantee
    assert "zero-out one user, at most 3 records a step" in str(guarantee)
    assert (guarantee.records, guarantee.arithmetic) == (5, "proved")
    assert guarantee.epsilon == hush.epsilon(plan, 5, 1e-2).epsilon
