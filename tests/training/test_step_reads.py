"""Models that turn records into Python numbers: nothing of one record is there when the next begins.

Each of these was trained once, and one record moved the sum by many times what is charged for it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.checks.module_state import ModuleState

RECORDS = 20
TARGETS = torch.zeros(RECORDS, dtype=torch.long)


def step_of(model: nn.Module, loss: Any = None, **parts: Any) -> hush.PrivateStep:
    plan = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=20.0),
        **parts,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return hush.PrivateStep(
        model,
        loss or nn.CrossEntropyLoss(),
        optimizer,
        plan,
        records=RECORDS,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(3)),
    )


def records(first: float) -> Tensor:
    inputs = torch.full((RECORDS, 4), 50.0)
    inputs[0] = first
    return inputs


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Cooldown(Linear):
    """Damps the records after an outlier; the attribute is back at the end of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def forward(self, x: Tensor) -> Tensor:
        damped = self.left > 0
        if damped:
            self.left -= 1
        elif x.abs().max().item() > 100:
            self.left = RECORDS - 2
        return self.linear(x * (not damped))  # type: ignore[no-any-return]


class WarmUp(Linear):
    """Counts its passes, and scales by the largest record after some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0, "scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        if self.state["calls"] > 20:  # more than in the probe
            self.state["scale"] = max(self.state["scale"], x.abs().max().item())
        return self.linear(x / self.state["scale"])  # type: ignore[no-any-return]


class ScaledLoss(nn.Module):
    """Divides by the largest loss so far, with the loss in an attribute of that name."""

    largest = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(reduction="none")

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values: Tensor = self.loss(outputs, targets)
        self.largest = max(self.largest, values.max().item())
        return values / self.largest


class BufferedLoss(ScaledLoss):
    """The same in a buffer, which counts calls as well, so that it changes for every record."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.tensor([0.0, 1e3]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values: Tensor = self.loss(outputs, targets)
        self.state[1] = max(self.state[1].item(), values.max().item())
        self.state[0] += 1
        return values / self.state[1]


def run(step: hush.PrivateStep, first: float, steps: int = 8) -> None:
    for batch in step.batches((records(first), TARGETS), steps=steps):
        step(batch)


def test_state_that_is_gone_at_the_end_of_a_batch_is_refused() -> None:
    run(step_of(Cooldown()), first=0.0)
    step = step_of(Cooldown())
    with pytest.raises(Unsupported, match="keeps left from its forward pass"):
        run(step, first=1e3)
    assert not step.ledger.counts


def test_without_the_look_after_each_pass_one_record_decides_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModuleState, "_after_pass", lambda self, reads_values: None)
    sums = []
    for first in (0.0, 1e3):
        step = step_of(Cooldown())
        batch = next(step.batches((records(first), TARGETS), steps=1))
        sums.append(step.clipped_sum(batch).clone())
    assert float((sums[0] - sums[1]).norm()) > 10, "a record is charged for 1"


def test_reading_values_after_passes_that_read_none_is_refused_where_state_changes() -> None:
    with pytest.raises(Unsupported, match=r"reads values of records .* changes state in others"):
        run(step_of(WarmUp()), first=1e12, steps=25)


@pytest.mark.parametrize(("loss", "name"), [(ScaledLoss, "largest"), (BufferedLoss, "state")])
def test_a_loss_that_keeps_a_record_is_refused(loss: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(Unsupported, match=rf"keeps loss\.{name} from"):
        run(step_of(Linear(), loss()), first=-1e9)


def into_several(state: Tensor, new: Tensor) -> None:
    torch._foreach_copy_([state], [new])


def by_numpy(state: Tensor, new: Tensor) -> None:
    state.numpy()[:] = new.numpy()


def by_data(state: Tensor, new: Tensor) -> None:
    state.data = new


WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    into_several,
    by_numpy,
    by_data,
    lambda state, new: torch.mul(new, 1.0, out=state),
    lambda state, new: state.untyped_storage().copy_(new.untyped_storage()),
]


@pytest.mark.parametrize("write", WRITES, ids=["foreach", "numpy", "data", "out", "storage"])
def test_a_value_in_a_buffer_is_refused_however_it_got_there(
    write: Callable[[Tensor, Tensor], Any],
) -> None:
    class Scaled(Linear):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.tensor([0.0, 100.0]))

        def forward(self, x: Tensor) -> Tensor:
            largest = max(self.state[1].item(), x.abs().max().item())
            write(self.state, torch.tensor([self.state[0].item() + 1, largest]))
            return self.linear(x / largest)  # type: ignore[no-any-return]

    with pytest.raises(Unsupported, match="keeps state from its forward pass"):
        run(step_of(Scaled()), first=1e9)


def test_values_that_are_read_in_a_test_alone_are_refused_where_they_stay() -> None:
    class Evaluated(Linear):
        largest = 1e3

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                self.largest = max(self.largest, x.abs().max().item())
            return self.linear(x / self.largest)  # type: ignore[no-any-return]

    release = hush.Selective(rate=1.0, clip=0.01, multiplier=20.0, test="summed", threshold=50.0)
    run(step_of(Evaluated(), release=release), first=0.0, steps=2)
    step = step_of(Evaluated(), release=release)
    with pytest.raises(Unsupported, match="keeps largest from its forward pass"):
        run(step, first=1e9, steps=2)
