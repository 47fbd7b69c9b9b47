"""Fisher information from a table, against the exact one."""

import numpy as np
import pytest
import torch

import hush
from hush.core.errors import Unsupported
from hush.core.parts import Noise
from hush.gradients.fisher import ERROR, Information


def plan_of(noise: Noise) -> hush.Plan:
    return hush.Plan(sampling=hush.Poisson(rate=0.1), clipping=hush.Linf(norm=0.5), noise=noise)


@pytest.mark.parametrize("scale", [0.3, 7.0])
@pytest.mark.parametrize("width", [0.05, 0.5, 1.5, 30.0])
@pytest.mark.parametrize("law", [hush.Rectified, hush.Truncated])
def test_never_below_the_exact_one_and_close(
    law: "type[hush.Rectified | hush.Truncated]", width: float, scale: float
) -> None:
    plan = plan_of(law(scale=scale, bound=width * scale))
    places = scale * np.concatenate(
        [np.random.default_rng(0).uniform(-4 - width, 4 + width, 4000), [0.0, width, -width, 39 + width]]
    )
    exact = hush.fisher(plan, places) * scale**2
    table = Information(plan, "cpu")
    found = table.at(torch.as_tensor(places)).numpy() * scale**2
    assert (found >= exact * (1 - 1e-12)).all()
    assert (found <= exact + 2 * ERROR).all()
    single = table.at(torch.as_tensor(places, dtype=torch.float32).view(2, -1))
    assert single.dtype == torch.float32
    assert single.double().view(-1).numpy() * scale**2 == pytest.approx(exact, abs=1e-5)
    # a table of another support is not this close
    other = plan_of(law(scale=scale, bound=width * scale * 1.01))
    assert np.abs(hush.fisher(other, places) * scale**2 - exact).max() > 2 * ERROR


def test_far_away_it_is_what_it_is_at_the_end_of_the_table() -> None:
    plan = plan_of(hush.Truncated(scale=2.0, bound=1.0))
    far = torch.tensor([90.0, -1e4, 1e30], dtype=torch.float64)
    found = Information(plan, "cpu").at(far).numpy()
    assert (found >= hush.fisher(plan, far.numpy())).all()
    assert (found <= hush.fisher(plan, [2 * 40.4])[0] + ERROR).all()


def test_the_normal_law_tells_the_same_everywhere() -> None:
    plan = plan_of(hush.Gaussian(multiplier=4.0))
    found = Information(plan, "cpu").at(torch.tensor([0.0, -3.3, 1e6], dtype=torch.float64))
    assert found.tolist() == pytest.approx([0.25] * 3)


def test_a_support_without_end_is_refused() -> None:
    with pytest.raises(Unsupported, match="1e\\+04 deviations"):
        Information(plan_of(hush.Rectified(scale=1.0, bound=1e4)), "cpu")
