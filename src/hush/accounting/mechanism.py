"""What a plan is to the accountant: the proved mechanism behind its parts, or an error."""

from collections.abc import Callable
from dataclasses import dataclass

from hush.clipping import L2
from hush.core.errors import Unproved
from hush.core.part import Always, Clipping, Noise, Release, Sampling
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson


@dataclass(frozen=True, order=True)
class SampledGaussian:
    """One step that adds normal noise to a sum in which each record takes part with some chance.

    `multiplier` is in units of the clipping norm, so the norm itself does not appear.
    """

    rate: float
    multiplier: float


def mechanism(plan: Plan) -> SampledGaussian:
    """The mechanism `plan` runs at each step; raises `Unproved` where nobody has proved one.

    **Guarantee.** docs/guarantees/poisson-gaussian.md: the dominating pair of one step is that of
    `SampledGaussian`, for neighbours that differ by adding or removing one record.
    """
    parts = (type(plan.sampling), type(plan.clipping), type(plan.noise), type(plan.release))
    build = _PROVED.get(parts)
    if build is None:
        names = " x ".join(part.__name__ for part in parts)
        known = "; ".join(" x ".join(part.__name__ for part in proved) for proved in _PROVED)
        raise Unproved(
            f"{names} has no proved guarantee: amplification, sensitivity and noise are proved "
            f"together, and a charge for parts that were not would be a guess. Use one of: {known}."
        )
    return build(plan)


def _sampled_gaussian(plan: Plan) -> SampledGaussian:
    assert isinstance(plan.noise, Gaussian)
    return SampledGaussian(plan.sampling.expected(1), plan.noise.multiplier)


_Parts = tuple[type[Sampling], type[Clipping], type[Noise], type[Release]]

# One entry per combination with a page in docs/guarantees; exact types, so that a subclass which
# changes what a part does is not charged as its parent.
_PROVED: dict[_Parts, Callable[[Plan], SampledGaussian]] = {
    (Poisson, L2, Gaussian, Always): _sampled_gaussian,
    (FullBatch, L2, Gaussian, Always): _sampled_gaussian,
}
