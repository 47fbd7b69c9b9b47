"""Checks before the first draw look at made-up records: a refusal tells nothing of private ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, PrivacyWarning, Unsupported
from hush.gradients.recording import record
from hush.training import memory
from hush.training.memory import activations, records_that_fit
from hush.training.synthetic import synthetic_records

RECORDS = 20
PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
)
LOSS = nn.CrossEntropyLoss(reduction="none")
TARGETS = torch.arange(RECORDS) % 2


def step_of(model: nn.Module, **options: Any) -> hush.PrivateStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, PLAN, records=RECORDS, **options)


def test_they_have_the_shapes_and_types_of_the_records_and_nothing_else() -> None:
    inputs = {"x": torch.full((2, 3, 5), 7.0, dtype=torch.float64), "ids": torch.full((2, 4), 9)}
    targets = torch.tensor([5, 6], dtype=torch.uint8)
    made_up = synthetic_records(inputs, targets)
    of_zeros = synthetic_records({"x": inputs["x"] * 0, "ids": inputs["ids"] * 0}, targets * 0)
    for value, of_zero, original in zip(
        (*made_up[0].values(), made_up[1]),
        (*of_zeros[0].values(), of_zeros[1]),
        (*inputs.values(), targets),
        strict=True,
    ):
        assert (value.shape, value.dtype) == (original.shape, original.dtype)
        assert torch.equal(value, of_zero), "the same whatever the records hold"
        assert (value[0] != value[1]).all()
    assert set(made_up[0]["ids"].flatten().tolist()) == {0, 1}


class Compares(nn.Module):
    """Gives each record's distance to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0, keepdim=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_whether_records_are_compared_is_found_whatever_the_first_two_hold(scale: float) -> None:
    """Two records that are alike have the same loss together and alone: they showed nothing."""
    torch.manual_seed(0)  # one in sixty random layers gives the two made-up records nearly the same loss
    inputs = torch.randn(RECORDS, 3)
    inputs[:2] *= scale
    with pytest.raises(Unsupported, match="who else is in the batch"):
        step_of(Compares()).batches((inputs, TARGETS))


def test_the_size_of_a_physical_batch_and_what_is_said_of_rounding_follow_no_record() -> None:
    probes = []
    for first in (torch.zeros(3), torch.full((3,), torch.nan), torch.full((3,), 1e30)):
        inputs = torch.ones(RECORDS, 3)
        inputs[0] = first
        step = step_of(nn.Linear(3, 2))
        probes.append((step.probe((inputs, TARGETS)), step.arithmetic))
    assert len(set(probes)) == 1


class Picky(nn.Module):
    """Takes lengths of at least 2, as packed sequences do: no made-up input is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, lengths: Tensor) -> Tensor:
        if bool((lengths < 2).any()):
            raise ValueError("too short")
        return self.layer(lengths.float())  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Uses one of its layers for large inputs alone, which no made-up one is."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        small: Tensor = self.small(x)
        return small + self.large(x) if x.max() > 100 else small


def test_a_branch_that_they_do_not_take_is_warned_of() -> None:
    inputs = torch.zeros(RECORDS, 3)
    step = step_of(Branches())
    with pytest.warns(PrivacyWarning, match=r"does not depend on large\.weight"):
        batches = step.batches((inputs + 1e3, TARGETS))
    assert step(next(batches))


class LayerDrop(nn.Module):
    """Leaves a layer out by chance, and another one always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.layer, self.left_out, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.left_out.requires_grad_(always)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x if torch.rand(()) < 0.5 else self.layer(x))  # type: ignore[no-any-return]


def test_a_layer_that_is_left_out_by_chance_is_not_one_that_is_never_used() -> None:
    for seed in range(10):  # in some of them both trial records leave it out
        torch.manual_seed(seed)
        step = step_of(LayerDrop(always=False))
        step(next(step.batches((torch.randn(RECORDS, 3), TARGETS))))
    step = step_of(LayerDrop(always=True))
    with pytest.warns(PrivacyWarning, match=r"does not depend on left_out\.weight, left_out\.bias for"):
        next(step.batches((torch.randn(RECORDS, 3), TARGETS)))


def test_a_model_that_does_not_take_them_is_tried_with_records() -> None:
    lengths = torch.randint(2, 9, (RECORDS, 1))
    step = step_of(Picky())
    for batch in step.batches((lengths, TARGETS), steps=2):
        step(batch)
    assert step.steps == 2
    with pytest.raises(ValueError, match="too short"):
        step_of(Picky()).batches((lengths * 0, TARGETS))


class Rows:
    """A data set whose labels are seen only when they are drawn."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.rows = list(zip(inputs, targets, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index]


def run(model: nn.Module, loss: Any, data: Any, ledger: Path | None = None) -> hush.PrivateStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, loss, optimizer, PLAN, records=6, ledger=ledger)
    for batch in step.batches(data, steps=1):
        step(batch)
    return step


def labels(*values: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 0, *values])[-6:]


@pytest.mark.parametrize("wrong", [8191, -8191, 2])
@pytest.mark.parametrize("place", [0, 5])
def test_a_label_that_is_no_class_is_refused_and_not_shown(
    wrong: int, place: int, tmp_path: Path
) -> None:
    inputs, targets = labels()
    targets[place] = wrong
    with pytest.raises(DataError, match="private and not shown") as raised:
        run(nn.Linear(3, 2), nn.CrossEntropyLoss(), (inputs, targets), tmp_path / "ledger")
    assert "8191" not in f"{raised.value}{raised.value.__cause__}"
    assert not hush.Ledger(tmp_path / "ledger", read_only=True).counts


def test_a_label_to_be_ignored_is_no_mistake() -> None:
    inputs, targets = labels()
    targets[2] = -100
    assert run(nn.Linear(3, 2), nn.CrossEntropyLoss(), (inputs, targets)).steps == 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none"),
    ],
    ids=["data set", "function"],
)
def test_what_is_seen_only_under_way_is_not_shown_either(loss: Callable[..., Tensor]) -> None:
    inputs, targets = labels()
    targets[4] = 8191
    data = Rows(inputs, targets)
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(DataError, match="private and not shown") as raised:
        run(model, loss, data)
    assert "8191" not in f"{raised.value}{raised.value.__cause__}"
    assert raised.value.__suppress_context__
    assert torch.equal(model.weight, before)


def test_a_token_that_is_not_in_the_embedding_is_not_shown() -> None:
    tokens = torch.zeros(6, 3, dtype=torch.int64)
    tokens[5, 1] = 8191
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(DataError, match="private and not shown"):
        run(model, nn.CrossEntropyLoss(), (tokens, labels()[1]))


def test_a_selective_test_does_not_show_it_either() -> None:
    inputs, targets = labels()
    targets[:] = 8191
    targets[:2] = 0
    release = hush.Selective(rate=1.0, clip=1.0, multiplier=1.0, test="mean")
    plan = hush.Plan(
        sampling=hush.Poisson(rate=1e-9), clipping=PLAN.clipping, noise=PLAN.noise, release=release
    )
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=6)
    batch = next(step.batches(Rows(inputs, targets)))  # none of them in the batch, all in the test
    with pytest.raises(DataError, match="private and not shown"):
        step(batch)


def test_what_a_forward_pass_keeps_is_counted_once_and_without_the_weights() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 10))
    inputs, targets = torch.randn(2, 100), torch.zeros(2, dtype=torch.long)
    size = activations(model, LOSS, inputs, targets)
    # the input, the output of tanh, the log of the softmax and what the loss itself keeps
    assert 4 * 2 * (100 + 50 + 10) <= size <= 4 * 2 * (100 + 50 + 10) + 64


def test_more_memory_for_each_record_means_fewer_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_HOST_MEMORY", 10**6)
    sizes = []
    for width in (10, 1000, 10**6):
        model = nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, 3))
        inputs, targets = torch.randn(2, width), torch.zeros(2, dtype=torch.long)
        sizes.append(
            records_that_fit(model, LOSS, inputs, targets, record(model, LOSS, inputs, targets))
        )
    assert sizes[0] > 10 * sizes[1] > 10 * sizes[2]
    assert sizes[2] == 1


def test_the_size_is_found_once_the_data_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_HOST_MEMORY", 1)
    for records_at_once, expected in ((None, 1), (3, 3)):
        model = nn.Linear(4, 3)
        step = hush.PrivateStep(
            model,
            LOSS,
            torch.optim.SGD(model.parameters()),
            PLAN,
            records=5,
            execution=hush.Execution(physical_batch=records_at_once),
        )
        batch = next(step.batches((torch.randn(5, 4), torch.zeros(5, dtype=torch.long))))
        assert batch.physical == expected


def test_a_process_that_shares_a_gpu_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    share = 1.0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 40)
    assert memory.memory_limit(device) == 200
    share = 0.1
    assert memory.memory_limit(device) == 15
    assert memory.memory_limit(torch.device("cpu")) == 2**27


class Sequences(nn.Module):
    """A table that is looked up at a few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(16, 32).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("per_unit", "bounded"), [(1024, True), (8200, False)])
def test_a_unit_that_is_not_split_is_in_what_is_said_of_rounding(per_unit: int, bounded: bool) -> None:
    """Sums over B records of 4 positions are bounded where 4 B^2 <= 2^28, and B is a whole unit."""
    slots, model = 8201, Sequences()
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        PLAN,
        units=hush.Units(owners=[0] * (slots - 1) + [1], per_unit=per_unit),
        execution=hush.Execution(physical_batch=2),
    )
    data = (torch.ones(slots, 4, dtype=torch.long), torch.arange(slots) % 2)
    step.probe(data)
    assert step.rounding_bounded is bounded


@pytest.mark.parametrize(("per_unit", "bounded"), [(1, True), (2, False)])
def test_units_that_fill_batches_by_half_are_in_what_is_said_of_rounding(
    per_unit: int, bounded: bool
) -> None:
    """A running total of m batches is bounded where m n <= 2^37: here m may be n / 2, or n."""
    slots, model = 450_000, nn.Linear(1, 2).double()
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        PLAN,
        units=hush.Units(owners=torch.arange(slots) // 2, per_unit=per_unit),
        execution=hush.Execution(physical_batch=2),
    )
    step.probe((torch.ones(slots, 1, dtype=torch.float64), torch.arange(slots) % 2))
    assert step.rounding_bounded is bounded


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_before_anything_is_spent(value: float) -> None:
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), last)
    with torch.no_grad():
        last.bias[0] = value
    step = step_of(model)
    with pytest.raises(Unsupported, match=r"1\.bias has a weight that is NaN or infinite"):
        step.batches((torch.randn(RECORDS, 3), TARGETS))
    assert not step.ledger.counts


def test_training_where_there_are_no_gradients_is_refused() -> None:
    step = step_of(nn.Linear(3, 2))
    with torch.inference_mode(), pytest.raises(Unsupported, match="there are no gradients"):
        step.batches((torch.randn(RECORDS, 3), TARGETS))


def test_of_many_parameters_that_are_not_used_a_few_are_named() -> None:
    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.others = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    step = step_of(Unused())
    with pytest.warns(PrivacyWarning, match=r", others\.1\.weight and 5 others for"):
        step.batches((torch.randn(RECORDS, 3), TARGETS))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x if x.sum() > 0 else -x)
        return output


def test_a_model_that_runs_one_record_at_a_time_is_warned_of() -> None:
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=4)
    data = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    with pytest.warns(hush.PrivacyWarning, match="one record at a time.*vectorize_attention"):
        step(next(step.batches(data)))
    assert step.arithmetic == "assumed"
