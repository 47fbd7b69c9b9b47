"""Statistics of the inputs' channels, to normalise by: noisy, and paid for."""

import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hush.accounting.charge import epsilon
from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.clipping.lp import NORM
from hush.core.errors import DataError
from hush.core.guarantee import Guarantee
from hush.core.number import number
from hush.core.plan import Plan
from hush.core.value import Value
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.fingerprint import fingerprint
from hush.training.mean import mean

_AT_ONCE = 1024
_FLOOR = number(
    above=0,
    at_most=1e12,
    why="noise can take a variance below zero, and nothing can be divided by its root",
    example=1e-5,
)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The mean and variance of each channel, which may be published."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, kw_only=True)
class NoisyMoments(Value):
    """Mean and variance of each channel over all records and places, from two noisy sums.

    What a record adds to the first is the mean of each of its channels, to the second the mean of the
    squares, either vector scaled down to a Euclidean norm of `norm` and `square_norm` at most.
    Variances below `floor` are set to it.

    **Guarantee.** Two releases of full batches with Gaussian noise: docs/guarantees/baselines.md. The
    norms and the floor must not depend on the records: a quantile of theirs is not public.

    >>> print(NoisyMoments(multiplier=8.0).guarantee(delta=1e-5).epsilon)
    <= 0.63398 (and >= 0.63398)
    """

    multiplier: float = field(metadata=MULTIPLIER)
    norm: float = field(default=1.0, metadata=NORM)
    square_norm: float = field(default=1.0, metadata=NORM)
    floor: float = field(default=1e-5, metadata=_FLOOR)

    @property
    def plan(self) -> Plan:
        """One of the two releases; they cost the same, whatever their norms."""
        return self._plan(1.0)

    def guarantee(self, delta: float) -> Guarantee:
        """What both cost, on their own."""
        return epsilon(self.plan, 2, delta)

    def __call__(
        self,
        inputs: Tensor,
        ledger: Ledger,
        *,
        generator: torch.Generator | None = None,
        secure: bool = False,
    ) -> Moments:
        """The moments of `inputs` (records, channels, places...), charged before they are known."""
        if inputs.ndim < 2 or not inputs.numel() or not inputs.is_floating_point():
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} and type {inputs.dtype} must be real numbers, "
                "records x channels x places: each record's own channels are what is bounded."
            )
        run, found = secrets.token_hex(8), []
        rows = summed(inputs)
        for step, (norm, values) in enumerate(
            zip((self.norm, self.square_norm), rows, strict=True), start=1
        ):
            noisy = mean(values, self._plan(norm), delta=1e-5, generator=generator, secure=secure)
            value = torch.from_numpy(noisy.value)
            ledger.charge(self.plan, run=run, step=step, release=fingerprint([value]))
            found.append(value)
        first, second = found
        variance = (second - first**2).clamp(min=self.floor)
        return Moments(mean=first, variance=variance)

    def _plan(self, norm: float) -> Plan:
        return Plan(
            sampling=FullBatch(),
            clipping=L2(norm=norm),
            noise=Gaussian(multiplier=self.multiplier),
        )


def summed(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each channel of each record, and that of the squares; what is not finite counts 0."""
    parts = []
    for some in inputs.split(_AT_ONCE):
        flat = some.to("cpu", torch.float64).reshape(*some.shape[:2], -1)
        whole = flat.flatten(1).isfinite().all(1)
        flat = flat.where(whole[:, None, None], 0.0)
        parts.append((flat.mean(2), flat.square().mean(2)))
    return torch.cat([first for first, _ in parts]), torch.cat([second for _, second in parts])
