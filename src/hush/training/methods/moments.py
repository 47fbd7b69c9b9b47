"""Differentially private mean and variance of the inputs, to normalise by."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import L2
from hush.clipping.norms import NORM
from hush.core.errors import DataError
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.randomness import derive_source, source_for
from hush.core.value import Value, check_kind, number
from hush.gradients.precision import vector_norms
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense, Term
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.distributed.process_group import check_first_rank
from hush.training.phases.private_gradient import fingerprint

Statistics = TypeVar("Statistics")
Pair = tuple[Term, Term]
"""Vectors that each record adds to the two sums."""

_AT_ONCE = 1024
_ROUNDING, _MOST_RECORDS = 2.0**-16, 2**21
"""Share of a record's bound that rounding in double precision may add, in sums of so many records."""
_CANCELLING = 2.0**10
"""Terms of a mean, in clipping norms, from which on rounding of what cancels may count."""
_FLOOR = number(
    above=0,
    at_most=1e12,
    why="noise can take a variance below zero, and nothing can be divided by its root",
    example=1e-5,
)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Mean and variance of each channel, which may be published."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, kw_only=True)
class NoisySums(Value, ABC, Generic[Statistics]):
    """Two sums of clipped vectors over the records, released under Gaussian noise.

    **Guarantee.** Two full-batch Gaussian mechanisms, and post-processing of their releases:
    docs/guarantees/baselines.md. The clipping norms must not depend on the records: a quantile of their
    norms is not public.

    Args:
        multiplier: noise multiplier of either sum.
        norm: l2 clipping norm of a record's first vector.
        square_norm: l2 clipping norm of its second vector.
    """

    multiplier: float = field(metadata=MULTIPLIER)
    norm: float = field(default=1.0, metadata=NORM)
    square_norm: float = field(default=1.0, metadata=NORM)

    @property
    def plan(self) -> Plan:
        """Plan of one of the two releases; they cost the same, whatever their norms."""
        return Plan(
            sampling=FullBatch(),
            clipping=L2(norm=1.0),
            noise=Gaussian(multiplier=self.multiplier),
        )

    def guarantee(self, delta: float) -> Guarantee:
        """(epsilon, delta) guarantee of both releases, on their own.

        Args:
            delta: of the guarantee.
        """
        return epsilon(self.plan, 2, delta)

    @abstractmethod
    def vectors(self, values: Tensor) -> Pair:
        """Vectors that each record adds to the two sums (sensitive).

        Args:
            values: of shape (records, channels, places), finite.
        """

    @abstractmethod
    def statistics(self, means: list[Tensor], shape: torch.Size) -> Statistics:
        """Post-processing of the two noisy means, which are public.

        Args:
            means: noisy means of the records' vectors.
            shape: of the inputs.
        """

    def __call__(
        self,
        inputs: Tensor,
        ledger: Ledger,
        *,
        generator: torch.Generator | None = None,
        secure: bool = False,
    ) -> Statistics:
        """Statistics of the inputs, charged before they are known.

        Args:
            inputs: of shape (records, channels, places...).
            ledger: ledger to charge, twice.
            generator: seeds the noise, so that it can be repeated: for tests.
            secure: draw noise from the operating system.

        Returns:
            Statistics that may be published with the guarantee.
        """
        check_first_rank(type(self).__name__)
        check_kind("ledger", ledger, Ledger).check_adjacency()
        check_kind("inputs", inputs, Tensor)
        if inputs.ndim < 2 or not inputs.numel() or not inputs.is_floating_point():
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} and type {inputs.dtype} must be floating-point "
                "numbers, records x channels x places, one at least of each: each record's own channels "
                "are what is bounded. Pass e.g. inputs.float()."
            )
        run, means = secrets.token_hex(8), []
        source = source_for(torch.device("cpu"), generator, secure=secure)
        source = derive_source(source, ledger.stream_label())
        for step, (norm, total) in enumerate(self.clipped_sums(inputs), start=1):
            noisy = self.plan.noise.privatize(total, norm=norm * (1 + _ROUNDING), generator=source)
            noisy.div_(len(inputs))
            ledger.charge(
                self.plan,
                run=run,
                step=step,
                release=fingerprint([noisy]),
                arithmetic="proved" if len(inputs) <= _MOST_RECORDS else "assumed",
                randomness="secret" if generator is None else "seeded",
                records=len(inputs),
            )
            means.append(noisy)
        return self.statistics(means, inputs.shape)

    def clipped_sums(self, inputs: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Clipping norm and clipped sum of either vector (sensitive)."""
        norms = self.norm, self.square_norm
        totals = [torch.zeros((), dtype=torch.float64)] * 2
        for values in finite_records(inputs):
            for place, rows in enumerate(self.vectors(values)):
                tape = GradientTape({"rows": rows}, values.device)
                totals[place] = totals[place] + L2(norm=norms[place]).clip(tape).total["rows"].cpu()
        return zip(norms, totals, strict=True)


@dataclass(frozen=True, kw_only=True)
class NoisyMoments(NoisySums[Moments]):
    """Differentially private mean and variance of each channel over all records and places.

    A record adds the mean of each of its channels to the first sum and the mean of their squares to the
    second, clipped to l2 norms of `norm` and `square_norm`.

    Args:
        multiplier: Noise of both sums, in units of their clipping norms.
        norm: Clipping norm of a record's means.
        square_norm: Clipping norm of a record's mean squares.
        floor: Variances below it are set to it.

    **Guarantee.** As of `NoisySums`; the floor must not depend on the records either.

    >>> print(NoisyMoments(multiplier=8.0).guarantee(delta=1e-5).epsilon)
    <= 0.63398 (and >= 0.63398)
    """

    floor: float = field(default=1e-5, metadata=_FLOOR)

    def vectors(self, values: Tensor) -> Pair:
        """Mean of each channel of each record, and mean of its squares.

        Places that cancel leave rounding in a mean, in an order that may depend on the other records.
        The means of a record fall to 0 where their terms are more than a thousand times `norm` long.

        Args:
            values: of shape (records, channels, places), finite.
        """
        terms = vector_norms(values.abs().mean(2), 2.0)
        trust = (2 - terms / (_CANCELLING * self.norm)).clamp(min=0.0, max=1.0).nan_to_num()
        return Dense(values.mean(2) * trust[:, None]), Dense(values.square().mean(2))

    def statistics(self, means: list[Tensor], shape: torch.Size) -> Moments:
        """Mean and variance of each channel of the inputs.

        Args:
            means: noisy means of the records' channel means, and of their squares.
            shape: of the inputs.
        """
        first, second = means
        return Moments(mean=first, variance=(second - first**2).clamp(min=self.floor))


def finite_records(inputs: Tensor) -> Iterator[Tensor]:
    """Some records at a time, channels x places each; one that is not finite counts 0."""
    for some in inputs.split(_AT_ONCE):
        flat = some.to(torch.float64).reshape(*some.shape[:2], -1)
        whole = flat.flatten(1).isfinite().all(1)
        yield flat.where(whole[:, None, None], 0.0)
