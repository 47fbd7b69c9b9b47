"""The loss of watched records against Jacobians written out, one record at a time."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hush
from hush.training.data import Batch
from hush_recipes.bounded.information import power_iteration_error
from hush_recipes.bounded.wide_resnet import Training, Watch, passed_on, train

CLIP, WATCHED, STEPS, ITERATIONS = 0.05, 4, 5, 40
BOUNDS = {"Gaussian": None, "rectified": 0.5, "truncated": 1.5}


def records() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(30, 5, generator=source), torch.randint(3, (30,), generator=source)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def training(kind: str, moments: int = STEPS) -> Training:
    return Training(
        kind=kind,
        scale=8.0,
        bound=BOUNDS[kind],
        clip=CLIP,
        batch=10,
        steps=STEPS,
        learning_rate=0.3,
        momentum=0.5,
        watched=WATCHED,
        moments=moments,
        iterations=ITERATIONS,
        failure=1e-6,
        seed=0,
    )


def clamped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One record's gradient by autograd in double precision, clamped."""
    exact = copy.deepcopy(model).double()
    loss = nn.functional.cross_entropy(exact(x.double()[None]), y[None])
    gradients = torch.autograd.grad(loss, list(exact.parameters()), create_graph=True)
    return torch.cat([part.reshape(-1) for part in gradients]).clamp(-CLIP, CLIP)


def largest_eigenvalues(model: nn.Module, plan: hush.Plan, taken: set[int]) -> list[float]:
    """The largest eigenvalue of each watched record, if it takes part with those that were drawn."""
    x, y = records()
    squared = []
    for k in range(WATCHED):
        location = sum(clamped(model, x[i], y[i]).detach() for i in taken | {k})
        eta = torch.as_tensor(hush.fisher(plan, torch.as_tensor(location).numpy())).sqrt()
        moved = torch.autograd.functional.jacobian(lambda v, k=k: clamped(model, v, y[k]), x[k].double())
        squared.append(float(torch.linalg.matrix_norm(eta[:, None] * moved, 2)) ** 2)
    return squared


@pytest.mark.parametrize("kind", list(BOUNDS))
def test_against_jacobians_that_are_written_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, drawn = np.zeros(WATCHED), []
    watch = Watch.__call__

    def compared(self: Watch, step: int, batch: Batch, location: Tensor) -> None:
        taken = set(batch.indices.tolist())
        drawn.append(taken)
        np.add(expected, np.array(largest_eigenvalues(self.model, self.plan, taken)) / 3, out=expected)
        watch(self, step, batch, location)

    monkeypatch.setattr(Watch, "__call__", compared)
    _, loss = train(training(kind), network(), records(), records())
    assert len(drawn) == STEPS
    assert any(taken & set(range(WATCHED)) for taken in drawn), "some take part and some do not"
    assert not all(set(range(WATCHED)) <= taken for taken in drawn)
    # upper ends of certified bounds, whose lower ends are close after so many multiplications
    assert (loss.eta() >= np.sqrt(expected) * (1 - 1e-5)).all()
    lower = loss.eta() * math.sqrt(1 - power_iteration_error(5, ITERATIONS, 1e-6))
    assert lower == pytest.approx(np.sqrt(expected), rel=0.01)


@pytest.mark.parametrize(("kind", "bound"), [("rectified", 0.5), ("truncated", 1.5)])
def test_what_a_law_passes_on(kind: str, bound: float) -> None:
    """By simulation: the mean of draws around a small sum, over that sum."""
    plan = Training(**{**vars(training(kind)), "bound": bound}).plan(30)
    deviation = 8.0 * CLIP
    at = torch.full((4_000_000,), 0.2 * deviation, dtype=torch.float64)
    drawn = plan.noise.privatize(at, norm=CLIP, generator=torch.Generator().manual_seed(0))
    # the mean bends a little at a fifth of a deviation
    assert float(drawn.mean()) / (0.2 * deviation) == pytest.approx(passed_on(plan), rel=0.03)
    assert passed_on(plan) < 0.8
    assert passed_on(training("Gaussian").plan(30)) == 1.0
