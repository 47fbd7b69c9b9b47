"""The parts of the trained twice-sampling recipes that a broken one would get wrong."""

from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import InvalidValue
from hush_recipes.twice import training, ways
from hush_recipes.twice.section6 import _noise
from hush_recipes.twice.training import twice_training
from hush_recipes.twice.ways import shaped, variance_of_mean


def test_noise_has_one_deviation_in_the_subspace_and_another_outside() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(60, 7))[0]
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack([_noise(basis, (5.0, 0.5), generator) for _ in range(2000)])
    inside = draws @ basis
    residual = draws - inside @ basis.T
    assert float(inside.std()) == pytest.approx(5.0, rel=0.03)
    assert float(residual.square().sum(1).mean()) == pytest.approx(0.25 * 53, rel=0.03)


def test_variances_are_of_the_mean_and_over_all_parameters() -> None:
    model = nn.Linear(99, 10, bias=False)

    def variance(sampling: hush.Poisson | hush.Twice, noise: hush.Gaussian, clipping: hush.L2) -> float:
        return variance_of_mean(hush.Plan(sampling=sampling, clipping=clipping, noise=noise), model)

    noise, clipping = hush.Gaussian(multiplier=2.0), hush.L2(norm=0.5)
    assert variance(hush.Poisson(rate=0.1), noise, clipping) == pytest.approx(990 * 1.0 / 0.01)
    twice = hush.Twice(rate=0.2, coordinate_rate=0.5)
    assert variance(twice, noise, clipping) == pytest.approx(990 * 1.0 / 0.01)
    hybrid = hush.Plan(
        sampling=hush.Poisson(rate=0.1),
        clipping=hush.Subspaces(ranks=(10, 980), l2=(3.0, 1.0), bases=hush.Principal()),
        noise=hush.BlockGaussian(multipliers=(1.0, 2.0)),
    )
    # the residual's noise in 980 dimensions: the others are taken out again
    assert variance_of_mean(hybrid, model) == pytest.approx((10 * 9 + 980 * 4) / 0.01)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_shapes_lie_between_isotropic_and_least_variance_at_the_same_epsilon(power: float) -> None:
    budget = hush.Budget(epsilon=2.0, delta=1e-5)
    clipping = hush.Subspaces(ranks=(10, 980), l2=(3.0, 1.0), bases=hush.Principal())
    noise = hush.Gaussian(multiplier=1.0)
    plan = hush.Plan(sampling=hush.Poisson(rate=0.1), clipping=clipping, noise=noise)
    least = hush.fit_noise(plan, budget, 50)
    between = shaped(least, power, budget, 50)
    assert 1.99 < hush.epsilon(between, 50, 1e-5).epsilon.upper <= 2.0

    def ratio(plan: hush.Plan) -> float:
        assert isinstance(plan.noise, hush.BlockGaussian)
        return 3.0 * plan.noise.multipliers[0] / plan.noise.multipliers[1]

    assert ratio(between) == pytest.approx(ratio(least) ** power)
    assert ratio(least) > 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "nope"}, "model='nope' must be one of resnet22, mnist-cnn"),
        ({"epsilons": (2.0, 3.0)}, "no number of steps for epsilon 3: choose from 2, 2.5, 4, 8, or"),
        ({"only": "nope"}, "nothing here has 'nope' in its name: choose from plain; "),
    ],
)
def test_wrong_options_are_refused_before_any_work(
    wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "load", lambda _: pytest.fail("it began"))
    with pytest.raises(InvalidValue, match=message):
        twice_training(**wrong)


def test_only_the_named_ways_are_calibrated_and_the_first_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrated: list[hush.Plan] = []

    def recorded(plan: hush.Plan, *_: object) -> hush.Plan:
        calibrated.append(plan)
        return plan

    images = torch.zeros(2100, 1, 28, 28), torch.zeros(2100, dtype=torch.int64)
    monkeypatch.setattr(ways, "inputs_on", lambda _: (images, images, images))
    monkeypatch.setattr(ways, "calibrate", recorded)
    monkeypatch.setattr(training, "_accuracy", lambda run: 0.5)
    figure = twice_training(only="twice", learning_rates=(1.0,))
    assert [type(plan.sampling) for plan in calibrated] == [hush.Poisson, hush.Twice]
    assert [row[2] for row in figure.rows] == ["twice"]
    plain, twice = (plan.sampling.expected(1) for plan in calibrated)
    assert figure.rows[0][5] == pytest.approx(100 * (plain / twice) ** 2), "relative to the plain way"
    monkeypatch.setattr(ways, "fit_noise", recorded)
    monkeypatch.setattr(ways, "shaped", recorded)
    clipping = hush.Subspaces(ranks=(10, 980), l2=(3.0, 1.0), bases=hush.Principal())
    monkeypatch.setattr(ways, "_subspaces", lambda *_, capped: clipping)
    made = ways._plans(ways.SETTINGS["mnist-cnn"], (0.1, 0.5), Any, Any, Any, 1, ways.NAMES)  # type: ignore[arg-type]
    assert tuple(made) == ways.NAMES
