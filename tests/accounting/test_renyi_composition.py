"""Which compositions are charged by Rényi divergence."""

from dataclasses import dataclass
from typing import Any

from hush.accounting.mechanism import SampledGaussian, SampledNoise
from hush.accounting.renyi_composition import requires_rdp


@dataclass(frozen=True)
class _OfNoKnownPair:
    """A mechanism that composition has never heard of."""

    rate: float = 1.0


def test_a_mechanism_without_a_known_pair_is_never_left_out_of_the_charge() -> None:
    steps: dict[Any, int] = {SampledGaussian(0.1, 1.0): 1, SampledNoise(0.1, 1.0, 1.0): 1}
    assert not requires_rdp(steps)
    steps[_OfNoKnownPair()] = 1
    assert requires_rdp(steps)
