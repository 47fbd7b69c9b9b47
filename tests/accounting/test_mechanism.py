"""Which plans the accountant will charge, and what it says about the others."""

from dataclasses import dataclass

import pytest

import hush
from hush.accounting.mechanism import SampledGaussian, mechanism
from hush.core.errors import Unproved


def plan(**parts: object) -> hush.Plan:
    usual: dict[str, object] = {
        "sampling": hush.Poisson(rate=0.1),
        "clipping": hush.L2(norm=1.0),
        "noise": hush.Gaussian(multiplier=2.0),
    }
    return hush.Plan(**{**usual, **parts})  # type: ignore[arg-type]


def test_poisson_gaussian_is_the_sampled_gaussian() -> None:
    assert mechanism(plan()) == SampledGaussian(0.1, 2.0)


def test_full_batch_is_rate_one() -> None:
    assert mechanism(plan(sampling=hush.FullBatch())) == SampledGaussian(1.0, 2.0)


def test_the_norm_cancels() -> None:
    assert mechanism(plan(clipping=hush.L2(norm=7.0))) == mechanism(plan())


@dataclass(frozen=True, kw_only=True)
class _Rounded(hush.Gaussian):
    """A subclass that may do anything: it is not what was proved."""


def test_anything_else_is_refused_by_name() -> None:
    with pytest.raises(Unproved, match=r"Poisson x L2 x _Rounded x Always.*Use one of: Poisson x L2"):
        mechanism(plan(noise=_Rounded(multiplier=2.0)))
