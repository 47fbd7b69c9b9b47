"""Records with several users: the accepted records, and what one user moves."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, InvalidValue
from tests.training import helpers
from tests.training.helpers import plan_of

PLAN = plan_of(hush.FullBatch(), hush.L2(0.5), 1e-6)


def crowd(records: int = 60, users: int = 25, seed: int = 0) -> list[set[int]]:
    """One to four users of each record."""
    drawn = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 5, (records,), generator=drawn)
    return [set(torch.randperm(users, generator=drawn)[:size].tolist()) for size in sizes.tolist()]


@pytest.mark.parametrize("per_user", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_every_user_is_in_few_accepted_records_and_no_record_could_be_added(
    per_user: int, seed: int
) -> None:
    users = crowd(seed=seed)
    kept = hush.bound_contributions(users, per_user).tolist()
    count = Counter(user for slot in kept for user in users[slot])
    assert max(count.values()) == per_user
    assert kept == sorted(set(kept))
    for slot in set(range(len(users))) - set(kept):
        assert any(count[user] == per_user for user in users[slot])


def test_records_with_few_users_come_first_and_ids_are_names_or_numbers() -> None:
    assert hush.bound_contributions([{"a", "b", "c"}, ["a"], ("b", "b"), {"c"}]).tolist() == [1, 2, 3]
    assert hush.bound_contributions(torch.tensor([[1, 2], [2, 3], [4, 5]])).tolist() == [0, 2]
    assert hush.bound_contributions([[1, 1], [1]], per_user=2).tolist() == [0, 1]


def change(slots: list[int], users: list[set[int]], user: int) -> float:
    """Change of a clipped sum over the slots if all records of a user are empty."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(len(users), 4) * 9, torch.randint(0, 3, (len(users),))
    data = inputs[slots], targets[slots]
    present = torch.tensor([user not in users[slot] for slot in slots])
    sums: list[Tensor] = []
    for mask in (None, present):
        torch.manual_seed(0)
        step = helpers.step_of(nn.Linear(4, 3), PLAN, seed=2, records=len(slots))
        sums.append(step.clipped_sum(next(step.batches(data, steps=1, present=mask))).clone())
    return float((sums[0] - sums[1]).norm())


@pytest.mark.parametrize("per_user", [1, 2])
def test_one_user_moves_a_sum_by_few_norms_and_without_the_selection_by_more(per_user: int) -> None:
    users, bound = crowd(), 0.5 * (1 + 1e-6)
    kept = hush.bound_contributions(users, per_user).tolist()
    moved = [change(kept, users, user) for user in range(25)]
    assert per_user / 4 < max(moved) <= per_user * bound
    # all records, each with its smallest user as the owner and one record per owner: the others of a
    # record are in several
    first = {min(each): slot for slot, each in reversed(list(enumerate(users)))}
    broken = [change(sorted(first.values()), users, user) for user in range(25)]
    assert max(broken) > bound


@pytest.mark.parametrize(
    ("users", "said"),
    [
        (["ann", "bob"], r"users\[0\] is a str, not a set of ids.*hush.Units"),
        ([{1}, 2], r"users\[1\] is an int, not a set of ids"),
        ([{1}, set()], r"users\[1\] is empty: nobody in this record would be protected"),
        ([{1}, {"1"}], "user ids of type int and str"),
        ([], "units is empty"),
    ],
)
def test_ids_that_protect_nobody_are_refused(users: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        hush.bound_contributions(users)


def test_a_user_has_at_least_one_record() -> None:
    with pytest.raises(InvalidValue, match="per_user"):
        hush.bound_contributions([{1}], per_user=0)


def test_units_with_several_users_name_the_selection() -> None:
    pairs: Any = [[1, 2], [3, 4]]
    with pytest.raises(DataError, match=r"hush\.bound_contributions\(ids\)"):
        helpers.step_of(nn.Linear(4, 3), PLAN, units=hush.Units(owners=pairs, per_unit=1))
