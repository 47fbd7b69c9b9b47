"""Which teacher a record goes to depends on nothing but the record, or its owner."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hush.core.errors import DataError, InvalidValue
from hush.models import build
from hush.pate.teachers import Lesson, predictions, teacher_of, train_teachers
from hush.training import checkpoint


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 4, 4, generator=generator), torch.arange(count) % 10


def test_removing_a_record_moves_no_other_one() -> None:
    x, y = records(200)
    before = teacher_of(x, y, 7)
    for gone in (0, 57, 199):
        remaining = torch.arange(200) != gone
        assert torch.equal(teacher_of(x[remaining], y[remaining], 7), before[remaining])
    shuffled = torch.randperm(200)
    assert torch.equal(teacher_of(x[shuffled], y[shuffled], 7), before[shuffled])


def test_shares_are_of_about_equal_size_and_the_label_counts() -> None:
    x, y = records(5000)
    sizes = torch.bincount(teacher_of(x, y, 10), minlength=10)
    assert int(sizes.min()) > 400
    assert int(sizes.max()) < 600
    assert not torch.equal(teacher_of(x, y, 10), teacher_of(x, (y + 1) % 10, 10))


def test_more_teachers_than_records_are_refused() -> None:
    with pytest.raises(DataError, match=r"teachers=30 is more than the 20 records"):
        teacher_of(*records(20), 30)
    with pytest.raises(InvalidValue, match="teachers=1 must be"):
        teacher_of(*records(20), 1)


OWNERS = [f"user {number * number % 41}" for number in range(300)]
"""21 users with 8 to 15 records each, scattered over the data set."""
NETWORK = partial(build, "logistic", classes=10, shape=(1, 4, 4))


def trained(folder: Path, remaining: Tensor, *, owned: bool) -> tuple[list[bytes], Tensor]:
    """Weights and votes of ten teachers of the records that remain, by their owners or by themselves."""
    x, y = records(300)
    data = x[remaining], y[remaining]
    owners = [owner for owner, there in zip(OWNERS, remaining.tolist(), strict=True) if there]
    assigned = teacher_of(*data, 10, owners if owned else None)
    train_teachers(folder, NETWORK, data, assigned, 10, Lesson(epochs=2, rate=0.1))
    states = [checkpoint.load(path)["weights"] for path in sorted(folder.iterdir())]
    bits = [b"".join(state[name].numpy().tobytes() for name in sorted(state)) for state in states]
    return bits, predictions(folder, NETWORK, 10, x[:50])


@pytest.mark.parametrize("gone", ["user 0", "user 4", "user 40"])
def test_removing_a_user_changes_one_teacher_and_its_votes_alone(tmp_path: Path, gone: str) -> None:
    """Teachers' weights, bit for bit. Records that are shared out one by one change several teachers."""
    remaining = torch.tensor([owner != gone for owner in OWNERS])
    everyone = torch.ones(300, dtype=torch.bool)
    changed = {}
    for owned in (True, False):
        whole, votes = trained(tmp_path / f"whole {owned}", everyone, owned=owned)
        without, fewer = trained(tmp_path / f"without {owned}", remaining, owned=owned)
        changed[owned] = [a != b for a, b in zip(whole, without, strict=True)]
        differing = (votes != fewer).any(1).tolist()
        assert all(moved for moved, vote in zip(changed[owned], differing, strict=True) if vote)
    assert sum(changed[True]) == 1
    assert sum(changed[False]) > 2


def test_users_stay_where_they_are_whatever_their_number_order_or_type() -> None:
    x, y = records(300)
    before = teacher_of(x, y, 7, OWNERS)
    for name in set(OWNERS):
        assert len({int(before[i]) for i, owner in enumerate(OWNERS) if owner == name}) == 1
    shuffled = torch.randperm(300).tolist()
    ids = [OWNERS[place] for place in shuffled]
    assert torch.equal(teacher_of(x[shuffled], y[shuffled], 7, ids), before[shuffled])
    numbers = [number % 50 for number in range(300)]
    by_type = [teacher_of(x, y, 7, kind) for kind in (numbers, np.array(numbers), torch.tensor(numbers))]
    assert torch.equal(by_type[0], by_type[1])
    assert torch.equal(by_type[0], by_type[2])


def test_users_are_shared_out_about_equally() -> None:
    x, y = records(5000)
    sizes = torch.bincount(teacher_of(x, y, 10, list(range(5000))), minlength=10)
    assert int(sizes.min()) > 400
    assert int(sizes.max()) < 600


@pytest.mark.parametrize(
    ("units", "teachers", "said"),
    [
        (["a"] * 299, 5, "300 records and units has 299 ids"),
        ([0.5] * 300, 5, "one integer or string a record"),
        ([["a", "b"]] * 300, 5, "give a record 2 owners"),
        ([], 5, "units is empty"),
        (["a", "b", "c"] * 100, 5, "teachers=5 is more than the 3 users"),
    ],
)
def test_owners_that_do_not_fit_are_refused(units: list[str], teachers: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        teacher_of(*records(300), teachers, units)
