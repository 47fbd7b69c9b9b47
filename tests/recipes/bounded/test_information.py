"""Certified spectral norms against materialised Jacobians, and the table of Fisher information."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import hush
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Clipping, Noise
from hush_recipes.bounded.information import ERROR, FisherInformationTable, power_iteration, spectrum


def materialised(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, clipping: Clipping, eta2: torch.Tensor
) -> float:
    """The largest squared singular value of diag(eta) J, from central differences."""

    def clipped(value: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(value[None]), y[None])
        flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        if isinstance(clipping, hush.Linf):
            return flat.clamp(-clipping.norm, clipping.norm)
        return flat * min(1.0, clipping.reference_norm / float(flat.norm()))

    columns = []
    for k in range(x.numel()):
        step = torch.zeros_like(x).reshape(-1)
        step[k] = 1e-6
        step = step.view_as(x)
        columns.append((clipped(x + step) - clipped(x - step)) / 2e-6)
    return float(torch.linalg.matrix_norm(torch.stack(columns, 1) * eta2.sqrt()[:, None], 2)) ** 2


@pytest.mark.parametrize("clipping", [hush.Linf(0.05), hush.L2(0.3), hush.L2(50.0)])
def test_the_certificate_holds_the_truth(clipping: Clipping) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    size = sum(p.numel() for p in model.parameters())
    eta2 = torch.rand(size, dtype=torch.float64)
    bounds = spectrum(
        model, nn.CrossEntropyLoss(), x, y, clipping, eta2, generator=torch.Generator().manual_seed(1)
    )
    truth = torch.tensor([materialised(model, a, b, clipping, eta2) for a, b in zip(x, y, strict=True)])
    assert (bounds.lower <= truth * (1 + 1e-5)).all()
    assert (truth <= bounds.upper * (1 + 1e-5)).all()
    assert (bounds.upper < 1.3 * bounds.lower + 1e-12).all()
    # the clip matters: without it the numbers are others
    free = spectrum(model, nn.CrossEntropyLoss(), x, y, hush.L2(1e6), eta2)
    if clipping.reference_norm < 1:
        assert not torch.allclose(free.lower, bounds.lower, rtol=0.05)


def test_few_iterations_are_paid_for() -> None:
    """A start that is nearly orthogonal to the top is what the certificate allows for."""
    values = torch.tensor([1.0] + [0.97] * 400, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2000, 401, generator=generator, dtype=torch.float64)
    for iterations in (1, 3, 10, 40):
        bounds = power_iteration(lambda v: v * values, start, iterations=iterations, failure=0.05)
        assert (bounds.upper < 1).double().mean() <= 0.05
        assert (bounds.lower <= 1 + 1e-12).all()
    # without the certificate most of them are too low
    short = power_iteration(lambda v: v * values, start, iterations=10, failure=0.05)
    assert (short.lower < 0.98).double().mean() > 0.9


def test_sampling_takes_part_of_the_information() -> None:
    """The information of a mixture, by integration: between rate^2 and rate times the step's."""
    z = np.linspace(-12, 12, 200_001)
    rate, shift = 0.2, 0.7

    def density(at: float) -> np.ndarray:
        return np.asarray(np.exp(-((z - at) ** 2) / 2) / math.sqrt(2 * math.pi))

    mixed = (1 - rate) * density(0.0) + rate * density(shift)
    slope = rate * (z - shift) * density(shift)
    information = float(np.trapezoid(slope**2 / mixed, z))
    assert rate**2 < information < rate * 1.0
    # far from the others' output it is known who took part: the factor is rate itself
    mixture = (1 - rate) * density(-10.0) + rate * density(shift)
    assert float(np.trapezoid(slope**2 / mixture, z)) == pytest.approx(rate, rel=1e-3)


def test_what_cannot_be_certified_raises() -> None:
    with pytest.raises(InvalidValue, match="iterations=0"):
        power_iteration(lambda v: v, torch.ones(1, 2), iterations=0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(Unproved, match="Lp has no Jacobian"):
        spectrum(
            model, nn.CrossEntropyLoss(), x, torch.tensor([0]), hush.Lp(p=3.0, norm=1.0), torch.ones(6)
        )


def plan_of(noise: Noise) -> hush.Plan:
    return hush.Plan(sampling=hush.Poisson(0.1), clipping=hush.Linf(0.5), noise=noise)


@pytest.mark.parametrize("scale", [0.3, 7.0])
@pytest.mark.parametrize("width", [0.05, 0.5, 1.5, 30.0])
@pytest.mark.parametrize("law", [hush.Rectified, hush.Truncated])
def test_never_below_the_exact_one_and_close(
    law: "type[hush.Rectified | hush.Truncated]", width: float, scale: float
) -> None:
    plan = plan_of(law(scale=scale, bound=width * scale))
    locations = scale * np.concatenate(
        [np.random.default_rng(0).uniform(-4 - width, 4 + width, 4000), [0.0, width, -width, 39 + width]]
    )
    exact = hush.fisher(plan, locations) * scale**2
    table = FisherInformationTable(plan, "cpu")
    information = table.at(torch.as_tensor(locations)).numpy() * scale**2
    assert (information >= exact * (1 - 1e-12)).all()
    assert (information <= exact + 2 * ERROR).all()
    single = table.at(torch.as_tensor(locations, dtype=torch.float32).view(2, -1))
    assert single.dtype == torch.float32
    assert single.double().view(-1).numpy() * scale**2 == pytest.approx(exact, abs=1e-5)
    # a table of another support is not this close
    wider = plan_of(law(scale=scale, bound=width * scale * 1.01))
    assert np.abs(hush.fisher(wider, locations) * scale**2 - exact).max() > 2 * ERROR
