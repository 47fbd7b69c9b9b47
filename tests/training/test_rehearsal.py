"""A rehearsal runs private steps and leaves everything as it was."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.parts import Release
from hush.training.rehearsal import rehearsal
from tests.training.helpers import plan_of, seeded, step_of

DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
SELECTIVE = hush.Selective(rate=0.5, clip=1.0, multiplier=1.0, test="mean")


class Counting(nn.Module):
    """A linear layer with a buffer that every call of it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs)


def built(release: Release | None, **passed: Any) -> hush.PrivateStep:
    torch.manual_seed(0)
    model = Counting()
    bases = hush.Principal(groups=1, every=2)
    chosen = (
        hush.Subspaces(ranks=(2, 8), l2=(1.0, 0.5), bases=bases) if "public" in passed else hush.L2(1.0)
    )
    plan = plan_of(hush.Poisson(0.5), chosen, release=release)
    make = partial(torch.optim.SGD, momentum=0.9)
    return step_of(model, plan, make=make, seed=3, records=20, **passed)


def run(step: hush.PrivateStep, steps: int) -> list[Tensor]:
    actual = []
    for batch in step.batches(DATA, steps=steps):
        step(batch)
        actual += [value.detach().clone() for value in step.model.parameters()]
    return actual


@pytest.mark.parametrize(
    ("release", "bases"),
    [(None, False), (SELECTIVE, False), (None, True)],
    ids=["always", "selective", "public bases"],
)
def test_a_run_goes_on_as_if_there_had_been_no_rehearsal(release: Release | None, bases: bool) -> None:
    public = torch.randn(12, 4, generator=seeded(3)), torch.arange(12) % 2
    passed = {"public": public} if bases else {}
    plain = built(release, **passed)
    expected = run(plain, 4)
    step = built(release, **passed)
    begun = run(step, 1)
    state = copy.deepcopy(step.state_dict())
    shared = torch.get_rng_state()
    with rehearsal(step):
        assert sum(step.ledger.counts.values()) == 0
        run(step, 3)
        assert step.steps == 4
        step.model.calls.add_(1)  # type: ignore[operator]
        step.model.register_buffer("seen", torch.ones(1))
        step.model.kept = [1]  # type: ignore[assignment]
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), shared)
    assert not hasattr(step.model, "seen")
    assert not hasattr(step.model, "kept")
    assert float(step.model.calls) == 0  # type: ignore[arg-type]
    assert sum(step.ledger.counts.values()) == step.steps == 1
    assert torch.equal(step.state_dict()["generator"], state["generator"])
    assert all(map(torch.equal, [*begun, *run(step, 3)], expected))
    assert step.spent(1e-5) == plain.spent(1e-5)
    assert step.accepted == plain.accepted


def test_a_batch_that_was_drawn_is_still_to_be_used_after_an_error_inside() -> None:
    step = built(None)
    batch = next(step.batches(DATA))
    before = [value.detach().clone() for value in step.model.parameters()]

    def interrupted() -> None:
        with rehearsal(step):
            run(step, 2)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        interrupted()
    assert all(map(torch.equal, before, step.model.parameters()))
    assert step.update is None
    assert step(batch)
    assert step.steps == 1
