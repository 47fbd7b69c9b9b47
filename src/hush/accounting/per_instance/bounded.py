"""Per-instance RDP and Fisher information of normal noise on a fixed support.

These numbers are computed from the records and are **sensitive**: publishing one would be a release
that no budget was spent on. Nothing here prints, logs or stores them.
"""

from functools import singledispatch

import numpy as np
import numpy.typing as npt

from hush.accounting.epsilon import checked_orders, rdp
from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.per_instance import laws as bounded_laws
from hush.accounting.per_instance.laws import Support
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.steps import SampledGaussian
from hush.clipping import L2, L2Linf, Linf
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Always, Noise, Release
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.value import as_floats, check_kind
from hush.noise import Gaussian, Quantized, Rectified, StochasticSign, Truncated
from hush.sampling import FullBatch

_CHUNK = 2**16
"""Coordinates processed at a time, to bound the memory: some dozen arrays of this length."""


def individual_rdp(
    plan: Plan, location: npt.ArrayLike, orders: npt.ArrayLike, change: npt.ArrayLike | None = None
) -> Array:
    """Per-instance Rényi divergence of one step of `plan` at each order (sensitive).

    Args:
        plan: full batches, `L2`, `Linf` or `L2Linf` clipping, noise of bounded support or Gaussian, and
            release of every step or of trials with public verdicts.
        location: the clipped sum of the records at hand.
        orders: each > 1.
        change: what a neighbour's sum has more than `location`: a vector, or a row for each neighbour.
            Unless given, any record may be added or removed. Of a trial, one record's change: its test
            is charged for one.

    Returns:
        The divergence at each order; a row for each row of `change`.

    **Guarantee** (per-instance). No less than the larger of the two directions, and no more than
    `hush.rdp(plan, orders)`, which holds for any records: docs/guarantees/bounded.md. A selective trial
    costs its test beside: docs/guarantees/selective.md, 9.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.Linf(norm=1.0),
    ...     noise=hush.Rectified(scale=1.0, bound=1.0),
    ... )
    >>> [round(float(hush.individual_rdp(plan, [at], orders=[2])[0]), 4) for at in (0.0, 6.0)]
    [0.8978, 0.0036]
    """
    support, scale = _release_law(plan)
    order_array, center = checked_orders(orders), as_vector("location", location)
    test, for_any = _test_rdp(plan.release, order_array), np.full(len(order_array), np.inf)
    if isinstance(plan.release, Selective):
        for_any = rdp(plan, order_array, len(center))
    if change is None:
        balls = plan.clipping.sensitivity(len(center))
        max_entry, radius = balls[0].max_entry, balls[0].l2_radius
        values = _product_rdp(
            support,
            center / scale,
            np.broadcast_to(max_entry / scale, center.shape),
            order_array,
            either_sign=True,
        )
        values = np.minimum(values, order_array * (radius / scale) ** 2 / 2 * OUTWARD)
        return np.asarray(np.minimum(values + test, for_any))
    changes = np.asarray(change, dtype=float)
    if changes.shape[-1:] != center.shape or changes.ndim > 2 or not np.isfinite(changes).all():
        raise InvalidValue(
            f"change of shape {changes.shape} must be {len(center)} finite numbers, or rows of as many: "
            "it is what a neighbour's sum has more than `location`. Pass e.g. change=-gradient.",
            key="change",
        )
    rows = [
        np.minimum(
            _product_rdp(support, center / scale, row / scale, order_array, either_sign=False) + test,
            for_any,
        )
        for row in np.atleast_2d(changes)
    ]
    return rows[0] if changes.ndim == 1 else np.stack(rows)


def fisher(plan: Plan, location: npt.ArrayLike) -> Array:
    """Fisher information eta^2 of one step about each coordinate of the clipped sum (sensitive).

    Args:
        plan: its noise and clipping decide; noise of bounded support or Gaussian.
        location: the clipped sum of the records at hand.

    Returns:
        One number a coordinate, in units of 1 / (unit of the sum)^2.

    **Guarantee.** Between 0 and 1/scale^2, right to 1e-8: docs/guarantees/fisher.md.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.Linf(norm=1.0),
    ...     noise=hush.Truncated(scale=1.0, bound=1.0),
    ... )
    >>> hush.fisher(plan, [0.0, 3.0]).round(6).tolist()
    [0.291125, 0.109583]
    """
    center = as_vector("location", location)
    check_kind("plan", plan, Plan)
    check_always_released(plan)
    support, scale = unit_law(plan.noise, plan.clipping.reference_norm)
    values = np.empty(len(center))
    for start in range(0, len(center), _CHUNK):
        part = slice(start, start + _CHUNK)
        values[part] = support.information(center[part] / scale) / scale**2
    return values


def unit_law(noise: Noise, unit: float) -> tuple[Support, float]:
    """The noise law in units of its standard deviation, and that deviation."""
    if type(noise) not in (*_unit_law.registry, Gaussian):
        raise Unproved(
            f"{type(noise).__name__} noise has no charge for the records at hand: it is proved for "
            "Rectified, Truncated, StochasticSign, Quantized and Gaussian. Use hush.rdp for the rest."
        )
    scale = noise.multiplier * unit if isinstance(noise, Gaussian) else noise.scale  # type: ignore[attr-defined]
    return _unit_law(noise, scale), scale


@singledispatch
def _unit_law(noise: Noise, scale: float) -> Support:
    return bounded_laws.Unbounded()


@_unit_law.register
def _(noise: Rectified, scale: float) -> Support:
    return bounded_laws.Rectified(noise.bound / scale)


@_unit_law.register
def _(noise: Truncated, scale: float) -> Support:
    return bounded_laws.Truncated(noise.bound / scale)


@_unit_law.register
def _(noise: StochasticSign, scale: float) -> Support:
    return bounded_laws.Atoms(np.zeros(1))


@_unit_law.register
def _(noise: Quantized, scale: float) -> Support:
    levels = np.linspace(-noise.bound, noise.bound, noise.levels) / scale
    return bounded_laws.Atoms((levels[1:] + levels[:-1]) / 2)


def _release_law(plan: Plan) -> tuple[Support, float]:
    """The noise law of a step of `plan` and its deviation, if a per-instance divergence is proved."""
    check_kind("plan", plan, Plan)
    if type(plan.sampling) is not FullBatch or type(plan.clipping) not in (L2, Linf, L2Linf):
        raise Unproved(
            f"{type(plan.sampling).__name__} x {type(plan.clipping).__name__} has no charge for the "
            "records at hand: with sampled records the location is a secret of the draw, and in other "
            "bases the law is no product. Use FullBatch with Linf, L2 or L2Linf, or hush.rdp."
        )
    return unit_law(plan.noise, plan.clipping.reference_norm)


def _test_rdp(release: Release, orders: Array) -> Array:
    """What a trial's test adds to the divergence of its noisy sum, for any records."""
    if type(release) is Always:
        return np.zeros(len(orders))
    if type(release) is Selective and release.accounting == "per-trial":
        return renyi_divergence(SampledGaussian(release.rate, release.multiplier), orders)
    raise Unproved(
        f"{release} has no charge for the records at hand: an update that was chosen among hidden ones "
        "costs more than the one step and test that it ended with. Use Always, or Selective with "
        'accounting="per-trial".'
    )


def check_always_released(plan: Plan) -> None:
    """Raise unless every step of the plan is released."""
    if type(plan.release) is not Always:
        raise Unproved(
            f"release={type(plan.release).__name__} is not covered for the records at hand: what is "
            "computed here is of the noisy sum alone, and a release rule tells of the records beside "
            "it. Leave out release=."
        )


def _product_rdp(
    support: Support, center: Array, shift: Array, orders: Array, *, either_sign: bool
) -> Array:
    """The larger direction of a product's divergences; `either_sign`: the worse at each coordinate."""
    signs = (1.0, -1.0) if either_sign else (1.0,)
    totals = np.zeros((2, len(orders)))
    for start in range(0, len(center), _CHUNK):
        chunk, chunk_shift = center[start : start + _CHUNK], shift[start : start + _CHUNK]
        for k, order in enumerate(orders):
            forward = [support.divergence(chunk, sign * chunk_shift, order) for sign in signs]
            backward = [
                support.divergence(chunk + sign * chunk_shift, -sign * chunk_shift, order)
                for sign in signs
            ]
            totals[0, k] += np.maximum.reduce(forward).sum()
            totals[1, k] += np.maximum.reduce(backward).sum()
    return np.asarray(totals.max(0) * OUTWARD)


def as_vector(name: str, value: npt.ArrayLike) -> Array:
    """The value as a finite vector."""
    values = as_floats(value)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InvalidValue(
            f"{name} of shape {values.shape} must be a vector of finite numbers: a charge is the sum "
            "over its coordinates, and one that is not a number bounds nothing. Pass the clipped sum.",
            key=name,
        )
    return values
