"""Which plans the accountant will charge, and what it says about the others."""

import math

import pytest

import hush
from hush.accounting.mechanism import mechanism
from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.steps import CoordinateWise, SampledGaussian, SampledNoise
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Clipping, Noise, SensitivitySet


def plan(**parts: object) -> hush.Plan:
    usual: dict[str, object] = {
        "sampling": hush.Poisson(0.1),
        "clipping": hush.L2(1.0),
        "noise": hush.Gaussian(2.0),
    }
    return hush.Plan(**{**usual, **parts})  # type: ignore[arg-type]


def test_a_refusal_says_what_why_and_which_part_to_change() -> None:
    with pytest.raises(Unproved) as raised:
        mechanism(plan(clipping=hush.Linf(1.0), noise=hush.Laplace(1.0)))
    what, why, remedy = str(raised.value).splitlines()
    assert what == "Poisson x Linf x Laplace x Always has no proved guarantee."
    assert "guess" in why
    assert remedy == (
        "Change the clipping to L2 or Lp, or the noise to Gaussian or Quantized or Rectified or "
        "StochasticSign or Truncated."
    )
    sampling, release = hush.Coordinate(rate=0.5), hush.Selective(rate=0.1, clip=1.0, multiplier=1.0)
    with pytest.raises(Unproved, match="README"):
        mechanism(plan(clipping=hush.Importance(1.0), release=release, sampling=sampling))


@pytest.mark.parametrize(
    ("clipping", "noise", "beta", "p"),
    [
        (hush.Lp(p=1.5, norm=3.0), hush.GeneralizedGaussian(beta=1.5, multiplier=2.0), 1.5, 1.5),
        (hush.L2(3.0), hush.GeneralizedGaussian(beta=4.0, multiplier=2.0), 4.0, 2.0),
        (hush.Lp(p=4.0, norm=3.0), hush.GeneralizedGaussian(beta=4.0, multiplier=2.0), 4.0, 4.0),
    ],
)
def test_other_noise_is_charged_coordinate_by_coordinate(
    clipping: Clipping, noise: Noise, beta: float, p: float
) -> None:
    step = mechanism(plan(clipping=clipping, noise=noise))
    ball = SensitivitySet(p=p, norm=1.0)
    assert step == CoordinateWise(0.1, ((CoordinateRDP(beta, 2.0), ball),))


def test_laplace_noise_in_l1_is_one_noisy_number() -> None:
    clipping = hush.Lp(p=1.0, norm=3.0)
    noisy = mechanism(plan(clipping=clipping, noise=hush.Laplace(2.0)))
    assert noisy == SampledNoise(0.1, 1.0, 2.0)
    assert (
        mechanism(plan(clipping=clipping, noise=hush.GeneralizedGaussian(beta=1, multiplier=2))) == noisy
    )


@pytest.mark.parametrize("clipping", [hush.L2(1.0), hush.Lp(p=2.0, norm=1.0)])
def test_an_exponent_of_two_is_the_gaussian(clipping: Clipping) -> None:
    noise = hush.GeneralizedGaussian(beta=2.0, multiplier=3.0)
    assert mechanism(plan(clipping=clipping, noise=noise)) == SampledGaussian(0.1, 3.0 / math.sqrt(2))
    assert mechanism(plan(clipping=clipping)) == mechanism(plan())


@pytest.mark.parametrize(
    ("clipping", "noise"),
    [
        (hush.L2(1.0), hush.Laplace(1.0)),
        (hush.L2(1.0), hush.GeneralizedGaussian(beta=1.5, multiplier=1.0)),
        (hush.Lp(p=1.0, norm=1.0), hush.Gaussian(1.0)),
        (hush.Lp(p=3.0, norm=1.0), hush.GeneralizedGaussian(beta=4.0, multiplier=1.0)),
    ],
)
def test_a_norm_that_does_not_fit_the_noise_is_refused_with_one_that_does(
    clipping: Clipping, noise: Noise
) -> None:
    with pytest.raises(Unproved, match=r"clips in l_.*is proved only for p = beta.*Clip with L"):
        mechanism(plan(clipping=clipping, noise=noise))


@pytest.mark.parametrize("clipping", [hush.clipping.Entries(changed=1), hush.Lp(p=13.0, norm=1.0)])
def test_an_exponent_beyond_the_bound_on_rounding_is_not_charged_as_one_number(
    clipping: Clipping,
) -> None:
    noisy = plan(
        sampling=hush.FullBatch(),
        clipping=clipping,
        noise=hush.GeneralizedGaussian(beta=13.0, multiplier=1.0),
    )
    if isinstance(clipping, hush.Lp):
        assert isinstance(mechanism(noisy, 1), CoordinateWise)
    else:
        with pytest.raises(InvalidValue, match=r"beta=13.0 must be between 1 and 12"):
            mechanism(noisy)
