"""Differentially private mean of the records under any plan."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.per_instance.bounded import individual_rdp
from hush.accounting.rdp.conversion import ORDERS, rdp_to_epsilon
from hush.core.errors import DataError, InvalidPlan, Unsupported
from hush.core.guarantee import Arithmetic, Bound, Guarantee, Secrecy, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.randomness import Randomness, cryptographic, source_for
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from hush.training.data import own_randomness

_ROUNDING = 2.0**-16
"""Share of its bound by which one row may move a sum more than that, in double precision, of up to
`_MOST_ROWS` rows: docs/guarantees/tape.md."""
_MOST_ROWS = 2**21


@dataclass(frozen=True, kw_only=True)
class PrivateMean:
    """A noisy mean and the guarantee of its release; both may be published."""

    value: npt.NDArray[np.float64]
    guarantee: Guarantee


def mean(
    records: npt.ArrayLike,
    plan: Plan,
    *,
    delta: float,
    generator: torch.Generator | None = None,
    secure: bool = False,
    arithmetic: Arithmetic = "proved",
) -> PrivateMean:
    """Differentially private mean of the records, a row each, under any plan.

    Rows are subsampled, clipped and summed, the sum is privatized, and divided by the expected number
    of rows. Noise on a fixed support
    bounds the *sum*: its `scale` and `bound` are as many times larger than those of the mean.

    **Guarantee.** `hush.epsilon(plan, steps=1, delta=delta)`: the value may be published with it. The
    number of rows is public; the row of an absent record is zero.

    Args:
        records: a row of finite numbers each.
        plan: how rows are sampled and clipped, and the noise.
        delta: of the guarantee.
        generator: seeds the draws, so that they can be repeated.
        secure: draw from the operating system.
        arithmetic: `assumed` draws noise with torch's own, faster generator.

    Returns:
        The noisy mean and its guarantee.

    >>> import hush, torch
    >>> rows = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0))
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=2.0),
    ...     noise=hush.Gaussian(multiplier=4.0),
    ... )
    >>> found = hush.mean(rows, plan, delta=1e-5, generator=torch.Generator().manual_seed(1))
    >>> print(found.value.round(2).tolist(), found.guarantee.epsilon)
    [0.5, 0.5, 0.49] <= 0.92634 (and >= 0.92634)
    """
    if not isinstance(plan, Plan):
        raise InvalidPlan(
            f"plan={plan!r} is not a plan: without its four parts there is nothing to charge. Pass "
            "hush.Plan(sampling=..., clipping=..., noise=...)."
        )
    rows = _rows(records)
    _check_always_released(plan)
    check_delta(delta, len(rows))
    guarantee = epsilon(plan, 1, delta, dimension=rows.shape[1])
    source = source_for(rows.device, generator, secure=secure, arithmetic=arithmetic)
    if not cryptographic(source) or len(rows) > _MOST_ROWS:
        guarantee = replace(guarantee, arithmetic="assumed")
    secrecy: Secrecy = "secret" if generator is None else "seeded"
    guarantee = replace(guarantee, randomness=secrecy, records=len(rows))
    taken = rows[plan.sampling.draw(len(rows), source).to(rows.device)]
    with own_randomness(source, rows.device):
        total = clipped_row_sum(taken, plan, source).mul_(1 - _ROUNDING)
    balls = plan.clipping.sensitivity(len(total))
    blocks = total.split([ball.dimension or len(total) for ball in balls])
    for block, (noise, norm) in zip(
        blocks, plan.noise.per_block(balls, plan.clipping.reference_norm), strict=True
    ):
        block.copy_(noise.privatize(block, norm=norm, generator=source))
    share = 1 - _ROUNDING if plan.noise.additive else 1.0
    value = total.div_(share * plan.sampling.expected(len(rows))).cpu().numpy()
    return PrivateMean(value=value, guarantee=guarantee)


def individual_mean(records: npt.ArrayLike, plan: Plan, *, delta: float) -> Guarantee:
    """Per-instance guarantee of `mean` for these records and any one added or removed (sensitive).

    **Guarantee** (per-instance). docs/guarantees/bounded.md; for full batches.

    Args:
        records: a row of finite numbers each.
        plan: full-batch plan of the mean.
        delta: of the guarantee.
    """
    _check_always_released(plan)
    rows = _rows(records)
    delta = check_delta(delta, len(rows))
    location = clipped_row_sum(rows, plan, None).numpy()
    upper = rdp_to_epsilon(individual_rdp(plan, location, ORDERS), ORDERS, delta)
    at_worst = epsilon(plan, 1, delta, dimension=len(location)).epsilon.upper
    return Guarantee(
        epsilon=Bound(lower=0.0, upper=min(upper, at_worst)),
        delta=delta,
        notion="per-instance",
        arithmetic="assumed",  # its bound is for the unrounded law
        records=len(rows),
        sensitive=True,
    )


def _check_always_released(plan: Plan) -> None:
    if type(plan.release) is not Always or getattr(plan.clipping, "bases", None) is not None:
        raise Unsupported(
            f"{plan} is for training: a mean is always shown, has no loss to test and no gradients to "
            "find directions in, so what is charged would not be what runs. Leave out release=, and "
            "clip without bases=."
        )


def clipped_row_sum(rows: Tensor, plan: Plan, source: "Randomness | None") -> Tensor:
    """Sum of the clipped rows, coordinates masked from the source if there is one (sensitive)."""
    tape = GradientTape(terms={"rows": Dense(rows)}, device=rows.device)
    if source is None or plan.sampling.coordinate_participation == 1:
        return plan.clipping.clip(tape).total["rows"]

    def mask(values: Tensor) -> Tensor:
        return plan.sampling.mask_coordinates(values, source)

    return plan.clipping.clip(tape, mask).total["rows"]


def _rows(records: npt.ArrayLike) -> Tensor:
    """Copy of the records in double precision."""
    values: Any = records
    try:
        rows = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
    except (TypeError, ValueError):
        raise DataError(f"records of type {type(values).__name__} {_WANTED}") from None
    if rows.is_complex():
        raise DataError(f"records of type {rows.dtype} {_WANTED}")
    rows = rows.detach().cpu().double().clone()
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not rows.numel() or not bool(rows.isfinite().all()):
        raise DataError(f"records of shape {tuple(rows.shape)} {_WANTED}")
    return rows


_WANTED = (
    "must be a row of finite real numbers each: one that is no number has no bounded influence. Pass "
    "e.g. an array of shape (records, numbers)."
)
