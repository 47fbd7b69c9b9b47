"""Differentially private mean of records under any plan."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger import LedgerOrPath, opened
from hush.clipping import Quantile
from hush.core.errors import DataError, Unsupported
from hush.core.guarantee import Guarantee, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.randomness import RandomSource, derive_source, source_for
from hush.core.value import check_kind
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from hush.training.data import own_randomness
from hush.training.distributed.processes import check_first_rank
from hush.training.fingerprint import fingerprint
from hush.training.records import check_numbers

ROUNDING, MOST_RECORDS = 2.0**-16, 2**21
"""Relative rounding slack on the sensitivity of a sum in double precision, and the maximum number of
records for which the slack is proved: docs/guarantees/tape.md."""


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
    """Add noise to sums, charge each release, and return the noisy sums divided by a public number.

    `sums` yields the clipping norm and the clipped sum of each release. It is read after the ledger is
    verified. `owner` is the statistic that error messages name.
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
    """Noisy mean and its guarantee, which may be published."""

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

    Rows are subsampled, clipped and summed. The noisy sum is divided by the expected number of sampled
    rows. `scale` and `bound` of bounded-support noise are in units of the sum.

    **Guarantee.** `hush.epsilon(plan, steps=1, delta=delta)` or, with `ledger`, the guarantee of all
    charges on it. The number of rows is public; the row of an absent record is zero.

    Args:
        records: Array of finite numbers, one row per record.
        plan: Sampling, clipping and noise.
        delta: Delta of the guarantee.
        ledger: Ledger, or its path, on which the mean is charged; by default a ledger in memory.
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
        if sum(charged.counts.values()) == 1:  # the known dimension may give a smaller bound
            alone = epsilon(plan, 1, delta, dimension=rows.shape[1])
            guarantee = replace(guarantee, epsilon=alone.epsilon)
        return PrivateMean(value=value.numpy(), guarantee=guarantee)


def clipped_row_sum(rows: Tensor, plan: Plan, source: "RandomSource | None" = None) -> Tensor:
    """Sum of the clipped rows (sensitive); the source is for coordinate sampling."""
    mask = None
    if source is not None and plan.sampling.coordinate_participation < 1:
        mask = partial(plan.sampling.mask_coordinates, generator=source)
    return plan.clipping.clip(GradientTape({"rows": Dense(rows)}, rows.device), mask).total["rows"]


def _mean_rows(records: npt.ArrayLike, plan: Plan) -> Tensor:
    """Copy of the records in double precision; raise if the plan cannot release a mean."""
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
