"""Statistics of the inputs' channels, to normalise by: noisy, and paid for."""

import secrets
from collections.abc import Iterator
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
from hush.core.randomness import source_for
from hush.core.value import Value
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.fingerprint import fingerprint

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
        return Plan(
            sampling=FullBatch(),
            clipping=L2(norm=1.0),
            noise=Gaussian(multiplier=self.multiplier),
        )

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
        source = source_for(torch.device("cpu"), generator, secure=secure)
        for step, (norm, total) in enumerate(self._sums(inputs), start=1):
            noisy = self.plan.noise.around(total, norm=norm, generator=source).div_(len(inputs))
            ledger.charge(self.plan, run=run, step=step, release=fingerprint([noisy]))
            found.append(noisy)
        first, second = found
        variance = (second - first**2).clamp(min=self.floor)
        return Moments(mean=first, variance=variance)

    def _sums(self, inputs: Tensor) -> list[tuple[float, Tensor]]:
        """Each norm, and the sum over the records of what is held within it."""
        norms = self.norm, self.square_norm
        totals = torch.zeros(2, inputs.shape[1], dtype=torch.float64)
        for rows in described(inputs):
            for norm, total, values in zip(norms, totals, rows, strict=True):
                tape = GradientTape({"rows": Dense(values)}, values.device)
                total += L2(norm=norm).clip(tape).total["rows"]
        return list(zip(norms, totals, strict=True))


def described(inputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The mean of each channel of each record, and that of the squares, some records at a time; what
    is not finite counts 0."""
    for some in inputs.split(_AT_ONCE):
        flat = some.to("cpu", torch.float64).reshape(*some.shape[:2], -1)
        whole = flat.flatten(1).isfinite().all(1)
        flat = flat.where(whole[:, None, None], 0.0)
        yield flat.mean(2), flat.square().mean(2)
