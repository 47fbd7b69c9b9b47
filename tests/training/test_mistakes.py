"""Mistakes of honest users that a step catches, and models that only look like mistakes."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hush
from hush.core.errors import HushError, LedgerError, PrivacyWarning, Unsupported
from tests.training import helpers
from tests.training.helpers import run

X, Y = torch.linspace(-1, 1, 30).view(6, 5), torch.tensor([0, 1, 0, 1, 0, 1])


def step_of(model: nn.Module, **options: Any) -> hush.PrivateStep:
    return helpers.step_of(model, records=6, **options)


def test_a_raw_step_of_a_fused_optimizer_which_torch_does_not_count_is_noticed() -> None:
    model = nn.Linear(5, 2)
    step = step_of(model, make=partial(torch.optim.Adam, fused=True))
    batches = step.batches((X, Y))
    step(next(batches))
    step(next(batches))  # a step's own writes are not noticed
    functional.cross_entropy(model(X), Y).backward()
    step.optimizer.step()
    step.optimizer.zero_grad()
    with pytest.raises(LedgerError, match="outside of the private step"):
        step(next(batches))
    with pytest.raises(LedgerError):
        step.spent(1e-3)


class Peak(nn.Module):
    """A buffer that only records beyond 6 move, which synthetic ones never are."""

    peak: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.register_buffer("peak", torch.tensor(6.0))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > self.peak:
            self.peak.fill_(float(x.max()))
        outputs: Tensor = self.linear(x / self.peak)
        return outputs


def test_a_buffer_that_a_rare_record_writes_to_stops_the_step_before_its_charge() -> None:
    step = step_of(Peak())
    rare = X.clone()
    rare[3, 0] = 50.0
    with pytest.raises(Unsupported, match="wrote to its buffers peak"):
        step(next(step.batches((rare, Y))))
    assert step.steps == 0


class RunningLoss(nn.Module):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        self.largest = torch.maximum(self.largest, losses.detach().max())
        return losses / (1 + self.largest)


def test_a_loss_that_keeps_something_of_a_record_is_refused() -> None:
    with pytest.raises(HushError, match="keeps"):
        step_of(nn.Linear(5, 2), loss=RunningLoss()).batches((X, Y))


class HostNoise(nn.Module):
    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.linear, self.branches = nn.Linear(5, 2), branches

    def forward(self, x: Tensor) -> Tensor:
        draws = 1 + int(x.sum() > 0) if self.branches else 1
        outputs: Tensor = self.linear(x * [random.random() for _ in range(draws)][-1])
        return outputs


def test_draws_of_python_are_each_records_own_if_records_run_alone() -> None:
    """How often one record draws must not move the gradients of the others."""
    sums = []
    for first in (X[:1], -X[:1]):
        torch.manual_seed(0)
        step = step_of(HostNoise(branches=True))
        data = torch.cat([first, X[1:]]), Y
        next(step.batches(data))
        before = random.getstate()
        torch.manual_seed(7)
        sums.append(step.gradients.record(*data).norms(2.0)[1:])
        assert random.getstate() == before
    torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=0)


def test_draws_of_python_that_records_share_weaken_the_guarantee() -> None:
    step = run(step_of(HostNoise(branches=False)), (X, Y))
    assert step.spent(1e-3).arithmetic == "assumed"


def test_a_frozen_layer_with_a_leftover_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    step = step_of(model, make=lambda _, lr: torch.optim.SGD(model.parameters(), lr=lr))
    batches = step.batches((X, Y))
    step(next(batches))
    model[0].weight.grad = torch.ones(4, 5)
    with pytest.raises(HushError):
        step(next(batches))


def test_an_interrupted_write_ends_the_use_of_a_ledger(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = hush.Ledger(tmp_path / "ledger.jsonl")
    step = step_of(nn.Linear(5, 2), ledger=ledger)
    batches = step.batches((X, Y))
    step(next(batches))
    assert ledger._file is not None
    append = ledger._file.append

    def interrupted(line: bytes) -> None:
        append(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger._file, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(next(batches))
    monkeypatch.undo()
    with pytest.raises(LedgerError):
        step(next(step.batches((X, Y))))
    with pytest.warns(PrivacyWarning, match="incomplete line"):
        step.spent(1e-3)


class Headed(nn.Module):
    """A head of its own on a body that another model may share."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def test_a_body_trained_under_another_ledger_is_noticed() -> None:
    body = nn.Linear(5, 4)
    first = run(step_of(Headed(body)), (X, Y))
    model = Headed(body)
    with pytest.warns(PrivacyWarning, match=f"another ledger \\({first.ledger.identity}\\)"):
        second = step_of(model)
    run(second, (X, Y))
    with pytest.warns(PrivacyWarning, match="the two costs add up"):
        second.spent(1e-3)
    with pytest.raises(LedgerError, match="outside of the private step"):
        first.spent(1e-3)
    body.requires_grad_(False)
    for parameter in body.parameters():
        parameter.data = parameter.data.clone()  # loaded from a public file
    step_of(Headed(body))


def test_a_pretrained_frozen_body_is_shared_without_a_warning() -> None:
    body = nn.Linear(5, 4).requires_grad_(False)
    for _ in range(2):
        run(step_of(Headed(body)), (X, Y)).spent(1e-3)
