"""Which compositions are charged by Rényi divergence."""

import math
from dataclasses import dataclass

import numpy as np

import hush
from hush.accounting.composition import delta_upper, delta_uppers, epsilon_upper, requires_rdp
from hush.accounting.epsilon import charged, compose
from hush.accounting.numerics import Array
from hush.accounting.steps import ComposableStep, SampledGaussian, SampledNoise


@dataclass(frozen=True)
class _Disclosure(ComposableStep):
    """A step that declares no more than it must: it publishes the record."""

    @property
    def participation(self) -> float:
        return 1.0

    @property
    def unsampled(self) -> "_Disclosure":
        return self

    def rdp(self, orders: Array) -> Array:
        return np.full(len(orders), np.inf)


def test_a_mechanism_without_a_known_pair_is_never_left_out_of_the_charge() -> None:
    steps: dict[ComposableStep, int] = {SampledGaussian(0.1, 1.0): 1, SampledNoise(0.1, 1.0, 1.0): 1}
    assert not requires_rdp(steps)
    steps[_Disclosure()] = 1
    assert requires_rdp(steps)
    assert epsilon_upper(steps, 1e-5) == math.inf


def test_sampled_laplace_and_selective_steps_compose() -> None:
    """The RDP of subsampled Laplace noise is known at whole orders alone, that of trials at any."""
    laplace = hush.Plan(
        sampling=hush.Poisson(rate=0.1),
        clipping=hush.Lp(p=1.0, norm=1.0),
        noise=hush.Laplace(multiplier=5.0),
    )
    selective = hush.Plan(
        sampling=hush.Poisson(rate=0.1),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=2.0),
        release=hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, test="mean"),
    )
    composed = compose({laplace: 20, selective: 20}, 1e-5).epsilon.upper
    assert compose({selective: 20}, 1e-5).epsilon.upper < composed
    # basic composition: epsilons and deltas add
    assert composed < sum(compose({plan: 20}, 5e-6).epsilon.upper for plan in (laplace, selective))


def test_deltas_at_many_epsilons_are_those_at_each() -> None:
    """With a dominating pair beside the Rényi divergences, and without one."""
    noise = hush.GeneralizedGaussian(beta=3.0, multiplier=3.0)
    for clipping in (hush.L2(norm=1.0), hush.Lp(p=3.0, norm=1.0)):
        plan = hush.Plan(sampling=hush.Poisson(rate=0.1), clipping=clipping, noise=noise)
        steps, _ = charged({plan: 5}, 40, hush.Adjacency())
        epsilons = [0.0, 0.3, 1.0, 2.0]
        alone = [delta_upper(steps, epsilon) for epsilon in epsilons]
        np.testing.assert_allclose(delta_uppers(steps, epsilons), alone, rtol=1e-3)
        assert alone == sorted(alone, reverse=True)
        assert alone[0] > 2 * alone[-1]
