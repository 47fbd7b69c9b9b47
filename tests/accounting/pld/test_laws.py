"""The law exp(-|x / scale|^beta) against 40 digits: ratios, where they are crossed, and tails."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import UNIT, Array
from hush.accounting.pld.laws import GeneralizedGaussianLaw

BETAS = st.one_of(st.sampled_from([1.0, 1 + 1e-9, 1.25, 1.99, 2.0, 2.33, 4.0, 12.0]), st.floats(1, 12))
# Powers of the noise from the middle of the law to where its mass underflows.
POWERS = np.exp(np.linspace(math.log(1e-6), math.log(650), 24))


def ratio(law: GeneralizedGaussianLaw, place: float) -> mp.mpf:
    """The log-ratio at |2x - 1| = place, from the definition."""
    beta, width = mp.mpf(law.beta), 2 * mp.mpf(law.scale)
    return ((1 + mp.mpf(place)) / width) ** beta - (abs(1 - mp.mpf(place)) / width) ** beta


def tail(law: GeneralizedGaussianLaw, noise: mp.mpf) -> mp.mpf:
    beta = mp.mpf(law.beta)
    return mp.gammainc(1 / beta, noise**beta, mp.inf, regularized=True) / 2


def faithful(law: GeneralizedGaussianLaw, model: GeneralizedGaussianLaw, noise: Array) -> bool:
    """Whether cuts and tails of `model` are those of `law`, up to the errors that are paid for.

    A cut's loss may be off by what `compose` adds to epsilon, a tail by `rounding`.
    """
    aims = np.abs(model.log_likelihood_ratio(noise, 0.0))
    without, with_record = model.invert_ratio(aims)
    tails = model.survival(np.abs(without)), model.survival(np.abs(with_record))
    errors = model.survival_error(np.abs(without)), model.survival_error(np.abs(with_record))
    with mp.workdps(40):
        for k in np.flatnonzero(np.isfinite(without)):
            place = float(2 * model.scale * without[k] - 1)
            if abs(ratio(law, place) - mp.mpf(float(aims[k]))) > 1e-13 * (1 + aims[k]) * _slack(law):
                return False
            for cut, masses, error in zip((without, with_record), tails, errors, strict=True):
                true = tail(law, abs(mp.mpf(float(cut[k]))))
                # below 1e-300 there is nothing left to be relative to
                if true > 1e-300 and abs(mp.mpf(float(masses[k])) / true - 1) > error[k] * UNIT:
                    return False
    return True


def _slack(law: GeneralizedGaussianLaw) -> float:
    # `without` is rounded; near the middle its power may be far larger than the log-ratio
    return 1 + law.beta * math.pow(1 / law.scale, law.beta)


@given(beta=BETAS, log_scale=st.floats(-1, 5))
@example(beta=1.0, log_scale=-2.0)
@example(beta=1 + 1e-12, log_scale=0.0)
@settings(max_examples=60, deadline=None)
def test_cuts_and_tails(beta: float, log_scale: float) -> None:
    law = GeneralizedGaussianLaw(beta, max(10**log_scale, 5e5 ** (-1 / beta)))
    noise = POWERS ** (1 / beta)
    assert faithful(law, law, np.append(-noise[::-1], noise))


@pytest.mark.parametrize("beta", [1.0, 1.25, 2.0, 4.0])
def test_another_law_is_seen(beta: float) -> None:
    law, noise = GeneralizedGaussianLaw(beta, 1.0), POWERS ** (1 / beta)
    assert not faithful(law, GeneralizedGaussianLaw(beta, 1 + 1e-9), noise)
    assert not faithful(law, GeneralizedGaussianLaw(beta + 1e-9, 1.0), noise)


@pytest.mark.parametrize("beta", [1.01, 1.25, 1.5, 2.0, 2.33, 4.0, 12.0])
@pytest.mark.parametrize("scale", [0.5, 1.0, 1e4])
def test_losses_where_cuts_are_put_are_the_losses_asked_for(beta: float, scale: float) -> None:
    law = GeneralizedGaussianLaw(beta, max(scale, 5e5 ** (-1 / beta)))
    aims = np.abs(law.log_likelihood_ratio(POWERS ** (1 / beta), 0.0))
    with mp.workdps(40):
        for aim, place in zip(aims, law._invert(aims), strict=True):
            if math.isfinite(place):
                # `compose` pays for 32 units a step
                assert abs(ratio(law, float(place)) - mp.mpf(float(aim))) <= 32 * UNIT * (1 + aim)
