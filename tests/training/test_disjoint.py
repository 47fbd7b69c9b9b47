import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

import hush
from hush.core.errors import DataError
from hush.training.disjoint import check_alone, check_distinct, check_held_out, check_public
from tests.training.helpers import plan_of, step_of

X, Y = torch.randn(1300, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(1300) % 3


class Listed(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.rand(()), torch.tensor(0)


def test_two_parts_of_one_tensor_are_two_sets() -> None:
    check_public((X[::2], Y[::2]), TensorDataset(X[1::2], Y[1::2]))
    whole = TensorDataset(X, Y)
    check_public(Subset(whole, range(10)), Subset(whole, range(10, 1300)))
    check_public(({"a": X[:3], "b": X[:3]}, Y[:3]), ({"a": X[3:], "b": X[3:]}, Y[3:]))
    check_public(Listed(X), Listed(X.clone()))  # its records never repeat


@pytest.mark.parametrize("place", [0, 600, 1199])
def test_one_record_in_both_is_refused_wherever_it_is_and_whatever_its_label(place: int) -> None:
    public = X[1200:].clone(), Y[1200:]
    private = X[:1200].clone(), Y[:1200].clone()
    check_public(public, private)
    private[0][place] = public[0][-1]
    private[1][place] = 7
    for ours in (public, TensorDataset(*public), (public[0].double(), public[1])):
        with pytest.raises(DataError, match="same inputs as public ones"):
            check_public(ours, private)


INPUTS, LABELS = torch.randn(10, 3), torch.arange(10) % 2
SET = TensorDataset(INPUTS, LABELS)


class Wrapped:
    """A map-style data set around another one, or around tensors."""

    def __init__(self, source: Any, targets: Tensor | None = None) -> None:
        self.source, self.targets = source, targets

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]


class Picked(Wrapped):
    """Some rows of a tensor, by their numbers."""

    def __init__(self, source: Tensor, numbers: list[int]) -> None:
        super().__init__(source)
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)


TRAINING = [
    (INPUTS, LABELS),
    SET,
    ({"x": INPUTS}, LABELS),
    ((INPUTS, INPUTS[:, :1]), LABELS),
    Wrapped(SET),
    Wrapped(INPUTS, LABELS),
    Subset(SET, range(10)),
]
OVERLAPPING = [
    *TRAINING,
    (INPUTS[:], LABELS.clone()),
    (INPUTS[4:5], LABELS[4:5]),
    (INPUTS.view(5, 2, 3), LABELS[:5]),
    (INPUTS.detach(), LABELS),
    TensorDataset(INPUTS[9:], LABELS[9:]),
    Subset(SET, [9]),
    Subset(Subset(SET, [1, 2]), [0]),
    ConcatDataset([TensorDataset(INPUTS.clone(), LABELS), SET]),
    (torch.from_numpy(INPUTS.numpy()[3:]), LABELS[3:]),
]


@pytest.mark.parametrize("evaluation", OVERLAPPING)
def test_records_of_the_training_data_are_found_in_any_wrapping(evaluation: Any) -> None:
    data: Any
    for data in TRAINING:
        with pytest.raises(DataError, match="evaluation is not"):
            check_held_out(evaluation, data)
        with pytest.raises(DataError, match=r"is the private data.*without a charge"):
            check_public(evaluation, data)


HALVES = random_split(SET, [6, 4])


@pytest.mark.parametrize(
    ("data", "evaluation"),
    [
        ((INPUTS[:8], LABELS[:8]), (INPUTS[8:], LABELS[8:])),
        ((INPUTS[8:], LABELS[8:]), (INPUTS[:8], LABELS[:8])),
        ((INPUTS[::2], LABELS[::2]), (INPUTS[1::2], LABELS[1::2])),
        (TensorDataset(INPUTS[:8], LABELS[:8]), ({"x": INPUTS[8:]}, LABELS[8:])),
        ((INPUTS, LABELS), (INPUTS.clone(), LABELS)),
        (HALVES[0], HALVES[1]),
        (Subset(SET, [0, 1]), (INPUTS[2:], LABELS[2:])),
        (Wrapped(HALVES[0]), Wrapped(HALVES[1])),
        (Picked(INPUTS, [0, 1]), Picked(INPUTS, [2, 3])),
    ],
)
def test_parts_of_one_tensor_or_data_set_without_a_common_record_are_apart(
    data: Any, evaluation: Any
) -> None:
    check_held_out(evaluation, data)


WHOLE = Listed(X)
REPEATED: dict[str, Any] = {
    "numbers": Subset(WHOLE, [0, 1, 1, 2]),
    "numbers of a subset": Subset(Subset(WHOLE, [4, 5, 4]), [0, 2]),
    "the same part": ConcatDataset([WHOLE, WHOLE]),
    "parts in common": ConcatDataset([Subset(WHOLE, range(5)), Subset(WHOLE, range(4, 9))]),
    "copies under other augmentation": ConcatDataset([Listed(X), Listed(X)]),
    "in a source": hush.Source(ConcatDataset([WHOLE, Subset(WHOLE, [3])]), workers=1),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_record_in_several_slots_is_found(kind: str) -> None:
    with pytest.raises(DataError, match=r"in several slots.*exceed the charge"):
        check_distinct(REPEATED[kind])


def test_slots_with_a_record_each_are_taken() -> None:
    parts = random_split(WHOLE, [300, 1000], torch.Generator().manual_seed(0))
    data: Any
    for data in (parts[0], ConcatDataset(parts), ConcatDataset([Listed(X[:5]), Listed(X[5:])])):
        check_distinct(hush.Source(data))


def table(rows: int) -> Any:
    """A Hugging Face data set, in memory."""
    datasets = pytest.importorskip("datasets")
    columns = {
        "x": [[float(row)] for row in range(rows)],
        "label": list(range(rows)),
        "text": ["a"] * rows,
    }
    return datasets.Dataset.from_dict(columns)


def test_rows_that_two_selections_of_a_table_share_are_found() -> None:
    whole = table(20)
    halves = whole.train_test_split(0.5, seed=0)
    shuffled = whole.shuffle(seed=0)
    apart = [
        (halves["test"], halves["train"]),
        (whole.select(range(8)), whole.select(range(8, 20))),
        (shuffled.select([3, 5]), shuffled.select([4, 6, 19])),
    ]
    for evaluation, data in apart:
        check_held_out(evaluation, hush.Source(data, targets="label"))
    common = [
        (whole.select(range(8)), whole.select(range(7, 20))),
        (whole.select([19, 3]).remove_columns("text"), whole.with_format("torch")),
        (shuffled, whole.select([11])),
        (Subset(whole, [2]), whole.select([2, 4])),
    ]
    for evaluation, data in common:
        with pytest.raises(DataError, match="evaluation is not"):
            check_held_out(evaluation, hush.Source(data, targets="label"))


class Items(Dataset[Any]):
    """Data set with containers of its records, and a function of it and a number that makes an item."""

    def __init__(self, item: Any, rows: int = 40, **held: Any) -> None:
        self.x, self.y = X[:rows].flatten(1).clone(), Y[:rows]
        self.array, self.listed = self.x.numpy(), list(self.x)
        self.data = TensorDataset(self.x, self.y)
        self.inner, self.indices = Listed(self.x), list(range(rows))
        self.item = item
        vars(self).update(held)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int, *options: Any) -> Any:
        return self.item(self, index, *options)


def mixed_with(other: Any) -> Any:
    def item(data: Any, index: int) -> tuple[Tensor, Tensor]:
        share = torch.rand(())
        return (1 - share) * data.x[index] + share * other(data, index), data.y[index]

    return item


def only_sometimes(data: Any, index: int) -> Any:
    return data.x[random.randrange(len(data))] if random.random() < 0.5 else data.x[index]


def random_row(data: Any, index: int) -> Any:
    row = random.randrange(len(data))
    return data.x[row], data.y[row]


def recursive(data: Any, index: int, mix: bool = True) -> Any:
    other = data.__getitem__(random.randrange(len(data)), False)[0] if mix else 0
    return X[index].flatten() + other, 0


MIXED: dict[str, Any] = {
    "rows of a tensor": mixed_with(lambda data, i: data.x[torch.randperm(len(data))[0]]),
    "rows of an array": mixed_with(lambda data, i: data.array[i] * data.array[np.random.randint(40)]),  # noqa: NPY002
    "items of a list": mixed_with(lambda data, i: data.listed[i] * random.choice(data.listed)),
    "a wrapped data set": mixed_with(
        lambda data, i: data.data[i][0] * data.data[random.randrange(9)][0]
    ),
    "a user's data set": mixed_with(
        lambda data, i: data.inner[i][0] * data.inner[random.randrange(9)][0]
    ),
    "four of the numbers": mixed_with(lambda data, i: data.x[random.sample(data.indices, 4)].mean(0)),
    "the next one": mixed_with(lambda data, i: data.x[i - 1]),
    "the mean of all": mixed_with(lambda data, i: data.x[:].mean(0)),
    "half of the time": mixed_with(only_sometimes),
    "random rows": random_row,
    "recursive items": recursive,
}


@pytest.mark.parametrize("kind", MIXED)
def test_items_that_read_other_records_are_refused(kind: str) -> None:
    data = Items(MIXED[kind])
    parts: Any = ConcatDataset([WHOLE, Subset(Subset(data, range(2, 30)), range(20))])
    wrapped: Any
    for wrapped in (data, parts, Wrapped(Wrapped(data))):
        with pytest.raises(DataError, match=r"reads several rows of .*Mix views of one record"):
            check_alone(hush.Source(wrapped))


def augmented(data: Any, index: int) -> tuple[Tensor, Tensor]:
    """Augmented, cached and looked up: one record an item."""
    if data.cache[index] is None:
        data.cache[index] = data.listed[index] * 2
    mixed = data.cache[index] + data.textures[random.randrange(7)]
    part = data.array[index : index + 1, :3].mean() + float(data.x[index, 2]) + data.data[index][1]
    return random.choice(data.transforms)(mixed) + part, data.y[torch.tensor([index])][0]


def ordinary(**held: Any) -> Items:
    own: dict[str, Any] = {
        "cache": [None] * 40,
        "textures": torch.randn(7, 6),
        "scale": torch.tensor(2.0),
    }
    return Items(augmented, transforms=[torch.sin, torch.cos], **own, **held)


def row_of_a_table(data: Any, index: int) -> tuple[Tensor, int]:
    row = data.frame.iloc[index]
    return torch.tensor([row["a"], data.frame["a"].iloc[index]]), int(data.frame.iloc[index, 1])


def test_items_of_one_record_are_taken(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    np.save(tmp_path / "x.npy", X.numpy())
    disk = ordinary(array=np.load(tmp_path / "x.npy", mmap_mode="r")[:40, 0])
    frame = pandas.DataFrame({"a": range(40), "b": range(40)})
    listed = Listed(X[:40])
    taken: list[Any] = [ordinary(), disk, Items(row_of_a_table, frame=frame), listed]
    taken += [Subset(listed, [5, 3, 2, 1]), ConcatDataset([ordinary(), listed])]
    taken += [Wrapped(Subset(listed, range(9)))]
    for data in taken:
        check_alone(hush.Source(data))
        assert len(hush.Source(data)[1]) == 2
    check_alone(hush.Source(table(20), targets="label"))
    mixed = mixed_with(lambda data, i: data.frame.iloc[[i, random.randrange(40)]]["a"].to_numpy().sum())
    with pytest.raises(DataError, match=r"reads several rows of self\.frame"):
        check_alone(hush.Source(Items(mixed, frame=frame)))


def test_as_many_public_images_as_records_are_taken() -> None:
    """Rows of a container that has no row of the item are not other records."""
    # its containers have the names of the private ones
    of_rows = mixed_with(lambda data, i: data.images.x[random.randrange(len(data))])
    check_alone(hush.Source(Items(of_rows, images=ordinary())))
    of_items = mixed_with(lambda data, i: data.images[random.randrange(len(data))][0])
    check_alone(hush.Source(Items(of_items, images=Listed(torch.randn(40, 6)))))


def test_mixup_costs_more_than_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, one record moves the clipped sum by several clipping norms."""
    torch.manual_seed(0)
    mixed = Items(mixed_with(lambda data, i: data.x[0]), rows=12)
    model = torch.nn.Linear(6, 3)
    plan = plan_of(noise=2.0)
    step = step_of(model, plan, seed=0, records=12)
    with pytest.raises(DataError, match="mixup"):
        step.batches(mixed)
    monkeypatch.setattr("hush.training.step.check_alone", lambda data: None)
    sums = []
    for scale in (1.0, 30.0):
        mixed.x[0] *= scale
        batch = next(step.batches(mixed, steps=1))
        sums.append(step.clipped_sum(batch).clone())
    moved = float((sums[0] - sums[1]).norm())
    charged = hush.epsilon(plan, steps=1, delta=1e-5).epsilon.upper
    quieter = replace(plan, noise=hush.Gaussian(2.0 / moved))
    spent = hush.epsilon(quieter, steps=1, delta=1e-5).epsilon.lower
    assert spent > 4 * charged
    costs = f"the step is charged epsilon {charged:.2g} and costs {spent:.3g}"
    pitfalls = (Path(hush.__file__).parents[2] / "docs/pitfalls.md").read_text()
    assert f"by {moved:.2g} clipping norms: {costs}" in pitfalls
