"""Private mean of the records under any plan, and private quantiles of norms."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger import LedgerOrPath, opened
from hush.accounting.per_instance import individual_rdp
from hush.accounting.rdp.conversion import ORDERS, rdp_to_epsilon
from hush.clipping import Entries, Quantile
from hush.core.errors import DataError, InvalidValue, Unsupported
from hush.core.guarantee import Bound, Guarantee, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.randomness import RandomSource, derive_source, source_for
from hush.core.value import Range, Value, check_count, check_kind, number
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.data import own_randomness
from hush.training.distributed.processes import check_first_rank
from hush.training.fingerprint import fingerprint
from hush.training.records import check_numbers

ROUNDING, MOST_RECORDS = 2.0**-16, 2**21
"""Relative rounding slack on the sensitivity of a sum in double precision, and the largest number of
records for which it is proved: docs/guarantees/tape.md."""
_EDGE = number(above=0, at_most=1e12, why="the bins are equally spaced in the logarithm", example=1.0)
QUANTILE = Range(above=0, below=1, why="it is a share of the records", example=0.99)


def release(
    owner: object,
    plan: Plan,
    sums: Iterable[tuple[float, Tensor]],
    ledger: LedgerOrPath,
    *,
    records: int,
    generator: torch.Generator | None,
    divisor: float = 1.0,
) -> list[Tensor]:
    """Noisy sums divided by a public number; each is charged before it is returned.

    `sums` yields the norm for the noise and the clipped sum of each release, after the ledger was
    verified. `owner` is the statistic, for error messages.
    """
    check_first_rank(type(owner).__name__)
    with opened(ledger) as charged:
        charged.check_adjacency()
        source = derive_source(source_for(torch.device("cpu"), generator), charged.stream_label())
        run, released = secrets.token_hex(8), []
        for step, (norm, total) in enumerate(sums, start=1):
            noisy = plan.noise.privatize(total, norm=norm, generator=source).div_(divisor)
            charged.charge(
                plan,
                run=run,
                step=step,
                release=fingerprint([noisy]),
                arithmetic="proved" if records <= MOST_RECORDS else "assumed",
                randomness="secret" if generator is None else "seeded",
                records=records,
            )
            released.append(noisy)
    return released


@dataclass(frozen=True, kw_only=True)
class PrivateMean:
    """A noisy mean and its guarantee; both may be published."""

    value: npt.NDArray[np.float64]
    guarantee: Guarantee


def mean(
    records: npt.ArrayLike,
    plan: Plan,
    *,
    delta: float,
    ledger: LedgerOrPath | None = None,
    generator: torch.Generator | None = None,
) -> PrivateMean:
    """Differentially private mean of the records (one row each) under any plan.

    Rows are subsampled, clipped and summed, and the noisy sum is divided by the expected number of rows.
    `scale` and `bound` of bounded-support noise are in units of the sum.

    **Guarantee.** `hush.epsilon(plan, steps=1, delta=delta)`, or with `ledger` the one of all its
    charges. The number of rows is public; the row of an absent record is zero.

    Args:
        records: Array of finite numbers, one row per record.
        plan: Sampling and clipping of the rows, and the noise.
        delta: Delta of the guarantee.
        ledger: Ledger or its path, charged before the mean is returned; by default a ledger in memory.
        generator: Seed of the draws, for tests.

    >>> import hush, torch
    >>> rows = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0))
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=2.0),
    ...     noise=hush.Gaussian(multiplier=4.0),
    ... )
    >>> found = hush.mean(rows, plan, delta=1e-5, generator=torch.Generator().manual_seed(1))
    >>> print(found.value.round(2).tolist(), found.guarantee.epsilon)
    [0.5, 0.5, 0.49] <= 0.92635 (and >= 0.92634)
    """
    rows = _mean_rows(records, plan)
    check_delta(delta, len(rows))
    with opened(ledger) as charged:
        charged.check_adjacency()
        source = derive_source(source_for(rows.device, generator), charged.stream_label())
        taken = rows[plan.sampling.draw(len(rows), source)]
        with own_randomness(source, rows.device):
            total = clipped_row_sum(taken, plan, source).mul_(1 - ROUNDING)
        balls = plan.clipping.sensitivity(len(total))
        blocks = total.split([ball.dimension or len(total) for ball in balls])
        laws = plan.noise.per_block(balls, plan.clipping.reference_norm)
        for block, (noise, norm) in zip(blocks, laws, strict=True):
            block.copy_(noise.privatize(block, norm=norm, generator=source))
        share = 1 - ROUNDING if plan.noise.additive else 1.0
        value = total.div_(share * plan.sampling.expected(len(rows)))
        charged.charge(
            plan,
            run=secrets.token_hex(8),
            step=1,
            release=fingerprint([value]),
            dimension=rows.shape[1],
            arithmetic="proved" if len(rows) <= MOST_RECORDS else "assumed",
            randomness="secret" if generator is None else "seeded",
            records=len(rows),
        )
        if charged.delta is None:
            charged.store_delta(delta)
        guarantee = charged.epsilon(delta)
        if sum(charged.counts.values()) == 1:  # the dimension may give a smaller bound
            alone = epsilon(plan, 1, delta, dimension=rows.shape[1])
            guarantee = replace(guarantee, epsilon=alone.epsilon)
        return PrivateMean(value=value.numpy(), guarantee=guarantee)


def individual_mean(records: npt.ArrayLike, plan: Plan, *, delta: float) -> Guarantee:
    """Per-instance guarantee of `mean` for these records and any one added or removed (sensitive).

    **Guarantee** (per-instance). docs/guarantees/bounded.md; for full batches.

    Args:
        records: Array of finite numbers, one row per record.
        plan: Full-batch plan of the mean.
        delta: Delta of the guarantee.
    """
    rows = _mean_rows(records, plan)
    delta = check_delta(delta, len(rows))
    location = clipped_row_sum(rows, plan).numpy()
    upper = rdp_to_epsilon(individual_rdp(plan, location, ORDERS), ORDERS, delta)
    at_worst = epsilon(plan, 1, delta, dimension=len(location)).epsilon.upper
    return Guarantee(
        epsilon=Bound(lower=0.0, upper=min(upper, at_worst)),
        delta=delta,
        notion="per-instance",
        arithmetic="assumed",  # the bound is for the unrounded law
        records=len(rows),
        sensitive=True,
    )


def clipped_row_sum(rows: Tensor, plan: Plan, source: "RandomSource | None" = None) -> Tensor:
    """Sum of the clipped rows, with coordinate sampling from the source, if any (sensitive)."""
    mask = None
    if source is not None and plan.sampling.coordinate_participation < 1:
        mask = partial(plan.sampling.mask_coordinates, generator=source)
    return plan.clipping.clip(GradientTape({"rows": Dense(rows)}, rows.device), mask).total["rows"]


def _mean_rows(records: npt.ArrayLike, plan: Plan) -> Tensor:
    """Copy of the records in double precision, for a plan that can release a mean."""
    check_kind("plan", plan, Plan)
    if (
        type(plan.release) is not Always
        or isinstance(plan.clipping, Quantile)
        or getattr(plan.clipping, "bases", None) is not None
        or plan.sampling.period > 1
    ):
        raise Unsupported(
            f"{plan} is for training: a mean has no loss to test, no gradients for public bases and no "
            "next step. Leave out release=, clip without bases= and not by Quantile, and sample from "
            "all records in one step."
        )
    values: Any = records
    if np.ma.is_masked(values):
        check_numbers(values)
    wanted = "must be rows of finite real numbers. Pass e.g. an array of shape (records, numbers)."
    try:
        rows = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
    except (TypeError, ValueError):
        raise DataError(f"records of type {type(values).__name__} {wanted}") from None
    if rows.is_complex():
        raise DataError(f"records of type {rows.dtype} {wanted}")
    check_numbers(rows)
    rows = rows.detach().cpu().double().clone()
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not rows.numel() or not bool(rows.isfinite().all()):
        raise DataError(f"records of shape {tuple(rows.shape)} {wanted}")
    return rows


@dataclass(frozen=True, kw_only=True)
class NoisyQuantile(Value):
    """Quantiles of per-record norms, one per block, from counts with Gaussian noise.

    Norms are counted in `bins` bins with geometrically growing edges from `low` to `high`; norms outside
    count in the first or last bin. A quantile is the upper edge of its bin.

    Args:
        multiplier: Noise multiplier of the counts.
        low: Lower end of the first bin.
        high: Upper end of the last bin.
        bins: Number of bins.

    **Guarantee.** One record adds 1 to one count of each block, for any norm:
    docs/guarantees/public-basis.md. The bins and the quantile must not depend on the data.

    >>> quantile = NoisyQuantile(multiplier=20.0)
    >>> print(quantile.guarantee(blocks=1, delta=1e-5))
    epsilon <= 0.16005 (no lower bound) at delta 1e-05 (dp, zero-out one record, proved, publishable)
    """

    multiplier: float = field(metadata=MULTIPLIER)
    low: float = field(default=1e-3, metadata=_EDGE)
    high: float = field(default=1e3, metadata=_EDGE)
    bins: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bins", check_count("bins", self.bins, "it is the number of bins", 2))
        if self.low >= self.high:
            raise InvalidValue(f"low={self.low:g} must be below high={self.high:g}.", key="low")

    @property
    def edges(self) -> Tensor:
        """Upper edge of each bin."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64).log()
        shares = torch.arange(1, self.bins + 1, dtype=torch.float64) / self.bins
        return (ends[0] + (ends[1] - ends[0]) * shares).exp()

    def plan(self, blocks: int) -> Plan:
        """Plan of the noisy histogram, for the ledger.

        Args:
            blocks: Number of norms per record.
        """
        noise = Gaussian(multiplier=self.multiplier)
        return Plan(sampling=FullBatch(), clipping=Entries(changed=blocks), noise=noise)

    def guarantee(self, blocks: int, delta: float) -> Guarantee:
        """(epsilon, delta) guarantee of the quantiles of all blocks, for this release alone.

        Args:
            blocks: Number of norms per record.
            delta: Failure probability.
        """
        return epsilon(self.plan(blocks), 1, delta)

    def _counts(self, norms: Tensor) -> Tensor:
        """Histogram of each block's norms, of shape (blocks, bins); each record is in one bin
        (sensitive)."""
        # a NaN would not be counted in any bin
        numbers = norms.to("cpu", torch.float64).nan_to_num(nan=self.high)
        bins = torch.bucketize(numbers, self.edges).clamp(max=self.bins - 1)
        counts = torch.zeros(norms.shape[1], self.bins, dtype=torch.float64)
        return counts.scatter_add_(1, bins.T, torch.ones(bins.T.shape, dtype=torch.float64))

    def __call__(
        self,
        norms: Tensor,
        quantile: float,
        ledger: LedgerOrPath,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[float, ...]:
        """Charge the release and return the noisy quantile of each block's norms.

        Args:
            norms: Norms of shape (records, blocks).
            quantile: Fraction of the records below the quantile.
            ledger: Ledger to charge, once for all blocks, or its path.
            generator: Seed of the noise, for tests.
        """
        quantile = QUANTILE.check("quantile", quantile)
        if norms.dim() != 2 or norms.shape[1] == 0:
            raise DataError(
                f"norms of shape {tuple(norms.shape)} must be records x blocks: a record counts once in "
                "each block."
            )
        plan = self.plan(norms.shape[1])
        sums = ((plan.clipping.reference_norm, self._counts(part)) for part in [norms])
        (noisy,) = release(self, plan, sums, ledger, records=len(norms), generator=generator)
        below = noisy.cumsum(1)
        reached = below >= quantile * below[:, -1:]
        reached[:, -1] = True
        return tuple(self.edges[reached.int().argmax(1)].tolist())
