"""The parts of the trained twice-sampling recipes that a broken one would get wrong."""

import pytest
import torch

import hush
from hush_recipes.twice.section6 import _noise
from hush_recipes.twice.ways import shaped


def test_noise_has_one_deviation_in_the_subspace_and_another_outside() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(60, 7))[0]
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack([_noise(basis, (5.0, 0.5), generator) for _ in range(2000)])
    inside = draws @ basis
    residual = draws - inside @ basis.T
    assert float(inside.std()) == pytest.approx(5.0, rel=0.03)
    assert float(residual.square().sum(1).mean()) == pytest.approx(0.25 * 53, rel=0.03)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_shapes_lie_between_isotropic_and_least_variance_at_the_same_epsilon(power: float) -> None:
    budget = hush.Budget(epsilon=2.0, delta=1e-5)
    clipping = hush.Subspaces(ranks=(10, 980), l2=(3.0, 1.0), bases=hush.Principal())
    noise = hush.Gaussian(1.0)
    plan = hush.Plan(sampling=hush.Poisson(0.1), clipping=clipping, noise=noise)
    least = hush.fit_noise(plan, budget, 50)
    between = shaped(least, power, budget, 50)
    assert 1.99 < hush.epsilon(between, 50, 1e-5).epsilon.upper <= 2.0

    def ratio(plan: hush.Plan) -> float:
        assert isinstance(plan.noise, hush.BlockGaussian)
        return 3.0 * plan.noise.multipliers[0] / plan.noise.multipliers[1]

    assert ratio(between) == pytest.approx(ratio(least) ** power)
    assert ratio(least) > 2
