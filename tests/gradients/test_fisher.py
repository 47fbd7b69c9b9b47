"""Certified spectral norms against Jacobians written out one record at a time."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import hush
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Clipping
from hush.gradients.fisher import gap, power_iteration, softmax_regression, spectrum


def written_out(
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


@pytest.mark.parametrize("clipping", [hush.Linf(norm=0.05), hush.L2(norm=0.3), hush.L2(norm=50.0)])
def test_the_certificate_holds_the_truth(clipping: Clipping) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    size = sum(p.numel() for p in model.parameters())
    eta2 = torch.rand(size, dtype=torch.float64)
    found = spectrum(
        model, nn.CrossEntropyLoss(), x, y, clipping, eta2, generator=torch.Generator().manual_seed(1)
    )
    truth = torch.tensor([written_out(model, a, b, clipping, eta2) for a, b in zip(x, y, strict=True)])
    assert (found.lower <= truth * (1 + 1e-5)).all()
    assert (truth <= found.upper * (1 + 1e-5)).all()
    assert (found.upper < 1.3 * found.lower + 1e-12).all()
    # the clip matters: without it the numbers are others
    free = spectrum(model, nn.CrossEntropyLoss(), x, y, hush.L2(norm=1e6), eta2)
    if clipping.reference_norm < 1:
        assert not torch.allclose(free.lower, found.lower, rtol=0.05)


def test_the_closed_form_of_a_linear_layer() -> None:
    torch.manual_seed(2)
    weights, x = torch.randn(4, 7, dtype=torch.float64), torch.randn(9, 7, dtype=torch.float64)
    y, eta2 = torch.randint(0, 4, (9,)), torch.rand(28, dtype=torch.float64)
    model = nn.Linear(7, 4, bias=False).double()
    model.load_state_dict({"weight": weights})
    normal = softmax_regression(weights, x, y, 0.1, eta2)
    truth = [written_out(model, a, b, hush.Linf(norm=0.1), eta2) for a, b in zip(x, y, strict=True)]
    matrices = torch.stack([normal(row.expand(9, 7)) for row in torch.eye(7, dtype=torch.float64)], 2)
    assert torch.allclose(matrices, matrices.transpose(1, 2))
    assert torch.linalg.eigvalsh(matrices)[:, -1].tolist() == pytest.approx(truth, rel=1e-4)


def test_few_iterations_are_paid_for() -> None:
    """A start that is nearly orthogonal to the top is what the certificate allows for."""
    values = torch.tensor([1.0] + [0.97] * 400, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2000, 401, generator=generator, dtype=torch.float64)
    for iterations in (1, 3, 10, 40):
        found = power_iteration(lambda v: v * values, start, iterations=iterations, failure=0.05)
        assert (found.upper < 1).double().mean() <= 0.05
        assert (found.lower <= 1 + 1e-12).all()
    # without the certificate most of them are too low
    short = power_iteration(lambda v: v * values, start, iterations=10, failure=0.05)
    assert (short.lower < 0.98).double().mean() > 0.9


def test_the_gap_closes_with_iterations_and_is_a_chance() -> None:
    gaps = [gap(1000, k, 1e-6) for k in (1, 10, 100, 1000)]
    assert gaps == sorted(gaps, reverse=True)
    assert 0 < gaps[-1] < 0.02 < gaps[0] < 1
    assert gap(1, 1, 1e-6) == 0
    chance = math.sqrt(2 * 1000 / math.pi) * (1 - gaps[2]) ** 100.5 / math.sqrt(gaps[2] * 201)
    assert chance == pytest.approx(1e-6, rel=1e-6)


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
    apart = (1 - rate) * density(-10.0) + rate * density(shift)
    assert float(np.trapezoid(slope**2 / apart, z)) == pytest.approx(rate, rel=1e-3)


def test_what_cannot_be_certified_raises() -> None:
    with pytest.raises(InvalidValue, match="iterations=0"):
        power_iteration(lambda v: v, torch.ones(1, 2), iterations=0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(Unproved, match="Lp has no Jacobian"):
        spectrum(
            model, nn.CrossEntropyLoss(), x, torch.tensor([0]), hush.Lp(p=3.0, norm=1.0), torch.ones(6)
        )


def test_each_record_may_have_information_of_its_own() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(0, 3, (4,))
    rows = torch.rand(4, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    clipping = hush.Linf(norm=0.05)
    found = spectrum(model, nn.CrossEntropyLoss(), x, y, clipping, rows, iterations=100)
    truth = [written_out(model, a, b, clipping, row) for a, b, row in zip(x, y, rows, strict=True)]
    assert found.lower.tolist() == pytest.approx(truth, rel=1e-4)
    one = spectrum(model, nn.CrossEntropyLoss(), x, y, clipping, rows[0], iterations=100)
    assert found.lower[1:].tolist() != pytest.approx(one.lower[1:].tolist(), rel=1e-3)
