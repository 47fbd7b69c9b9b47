"""What a release on a fixed support costs the records at hand: Rényi divergence and Fisher information.

These numbers are computed from the records and are **sensitive**: publishing one would tell about the
records what no budget was spent on. Nothing here prints, logs or stores them.
"""

from functools import singledispatch

import numpy as np
import numpy.typing as npt

from hush.accounting.epsilon import checked_orders
from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.per_instance import laws as bounded_laws
from hush.accounting.per_instance.laws import Support
from hush.clipping import L2, L2Linf, Linf
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Noise
from hush.core.plan import Plan
from hush.core.ranges import as_floats, check_kind
from hush.noise import Gaussian, Quantized, Rectified, StochasticSign, Truncated
from hush.sampling import FullBatch

_CHUNK = 2**16
"""Coordinates worked on at once: some dozen arrays of this length, whatever the dimension."""


def individual_rdp(
    plan: Plan, location: npt.ArrayLike, orders: npt.ArrayLike, change: npt.ArrayLike | None = None
) -> Array:
    """The Rényi divergence, at each order, of one step of `plan` whose sum is `location` (sensitive).

    Without `change` it is for whatever record is added to these or removed from them. With it, for the
    neighbours whose sum is `location + change`: a vector, or a row for each neighbour, which gives a row
    of divergences each.

    **Guarantee** (per-instance). No less than the larger of the two directions, and no more than
    `hush.rdp(plan, orders)`, which holds for any records: docs/guarantees/bounded.md.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.Linf(norm=1.0),
    ...     noise=hush.Rectified(scale=1.0, bound=1.0),
    ... )
    >>> [round(float(hush.individual_rdp(plan, [at], orders=[2])[0]), 4) for at in (0.0, 6.0)]
    [0.8978, 0.0036]
    """
    support, scale = _released(plan)
    wanted, at = checked_orders(orders), as_vector("location", location)
    if change is None:
        balls = plan.clipping.sensitivity(len(at))
        top, radius = balls[0].max_entry, balls[0].l2_radius
        found = _summed(support, at / scale, np.broadcast_to(top / scale, at.shape), wanted, both=True)
        return np.minimum(found, wanted * (radius / scale) ** 2 / 2 * OUTWARD)
    moved = np.asarray(change, dtype=float)
    if moved.shape[-1:] != at.shape or moved.ndim > 2 or not np.isfinite(moved).all():
        raise InvalidValue(
            f"change of shape {moved.shape} must be {len(at)} finite numbers, or rows of as many: "
            "it is what a neighbour's sum has more than `location`. Pass e.g. change=-gradient.",
            key="change",
        )
    rows = [
        _summed(support, at / scale, row / scale, wanted, both=False) for row in np.atleast_2d(moved)
    ]
    return rows[0] if moved.ndim == 1 else np.stack(rows)


def fisher(plan: Plan, location: npt.ArrayLike) -> Array:
    """eta^2 for each coordinate: the Fisher information that one step gives about the sum (sensitive).

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
    at = as_vector("location", location)
    check_kind("plan", plan, Plan)
    support, scale = support_of(plan.noise, plan.clipping.reference_norm)
    found = np.empty(len(at))
    for start in range(0, len(at), _CHUNK):
        part = slice(start, start + _CHUNK)
        found[part] = support.information(at[part] / scale) / scale**2
    return found


def support_of(noise: Noise, unit: float) -> tuple[Support, float]:
    """The law in units of its deviation, and the deviation."""
    if type(noise) not in (*_support.registry, Gaussian):
        raise Unproved(
            f"{type(noise).__name__} noise has no charge for the records at hand: it is proved for "
            "Rectified, Truncated, StochasticSign, Quantized and Gaussian. Use hush.rdp for the rest."
        )
    scale = noise.multiplier * unit if isinstance(noise, Gaussian) else noise.scale  # type: ignore[attr-defined]
    return _support(noise, scale), scale


@singledispatch
def _support(noise: Noise, scale: float) -> Support:
    return bounded_laws.Unbounded()


@_support.register
def _(noise: Rectified, scale: float) -> Support:
    return bounded_laws.Rectified(noise.bound / scale)


@_support.register
def _(noise: Truncated, scale: float) -> Support:
    return bounded_laws.Truncated(noise.bound / scale)


@_support.register
def _(noise: StochasticSign, scale: float) -> Support:
    return bounded_laws.Atoms(np.zeros(1))


@_support.register
def _(noise: Quantized, scale: float) -> Support:
    levels = np.linspace(-noise.bound, noise.bound, noise.levels) / scale
    return bounded_laws.Atoms((levels[1:] + levels[:-1]) / 2)


def _released(plan: Plan) -> tuple[Support, float]:
    """The law that a step of `plan` draws from, if its divergence is known at a location."""
    check_kind("plan", plan, Plan)
    if type(plan.sampling) is not FullBatch or type(plan.clipping) not in (L2, Linf, L2Linf):
        raise Unproved(
            f"{type(plan.sampling).__name__} x {type(plan.clipping).__name__} has no charge for the "
            "records at hand: with sampled records the location is a secret of the draw, and in other "
            "bases the law is no product. Use FullBatch with Linf, L2 or L2Linf, or hush.rdp."
        )
    return support_of(plan.noise, plan.clipping.reference_norm)


def _summed(support: Support, at: Array, shift: Array, orders: Array, *, both: bool) -> Array:
    """The larger direction of a product's divergences; of `both` signs, the worse at each coordinate."""
    signs = (1.0, -1.0) if both else (1.0,)
    totals = np.zeros((2, len(orders)))
    for start in range(0, len(at), _CHUNK):
        here, moved = at[start : start + _CHUNK], shift[start : start + _CHUNK]
        for k, order in enumerate(orders):
            away = [support.divergence(here, sign * moved, order) for sign in signs]
            back = [support.divergence(here + sign * moved, -sign * moved, order) for sign in signs]
            totals[0, k] += np.maximum.reduce(away).sum()
            totals[1, k] += np.maximum.reduce(back).sum()
    return np.asarray(totals.max(0) * OUTWARD)


def as_vector(name: str, value: npt.ArrayLike) -> Array:
    found = as_floats(value)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise InvalidValue(
            f"{name} of shape {found.shape} must be a vector of finite numbers: a charge is the sum "
            "over its coordinates, and one that is not a number bounds nothing. Pass the clipped sum.",
            key=name,
        )
    return found
