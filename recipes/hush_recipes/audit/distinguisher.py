"""Likelihood-ratio distinguisher: a lower bound on epsilon of what a plan runs, against the charge."""

import math

import numpy as np
import torch

from hush.accounting.epsilon import epsilon
from hush.accounting.per_instance import individual_rdp
from hush.accounting.rdp.conversion import ORDERS, rdp_to_epsilon
from hush.audit.lower_bound import Array
from hush.core.errors import Unsupported
from hush.core.plan import Plan
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from hush_recipes.audit import copies
from hush_recipes.audit.scores import Audit, Draws

DELTA = 0.01
"""Large, so that what it leaves out can be counted: docs/guarantees/audit.md."""


def audit(
    plan: Plan,
    *,
    touched: int = 1,
    dimension: int | None = None,
    steps: int = 1,
    runs: int = 10_000,
    others: int = 0,
    at_hand: bool = False,
    delta: float = DELTA,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """Attack on `steps` steps of `plan` by a record that fills the clipping in `touched` numbers.

    The steps are those of `PrivateStep`; the attacker sees every noisy update, knows everything but
    whether the record is there, and scores by the likelihood ratio. `others` as in `copies.released`;
    `at_hand` holds the result against the charge for the records at hand (a bounded law, one step).

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> attack = audit(plan, confidence=0.999)
    >>> attack.holds, attack.tightness > 0.5
    (True, True)
    """
    outputs = copies.released(plan, touched=touched, runs=runs, steps=steps, others=others, seed=seed)
    shift = clipped(plan, touched)
    around = others * shift
    scores = Draws(
        present=log_ratio(plan, outputs.present, shift, around),
        absent=log_ratio(plan, outputs.absent, shift, around),
    )
    if at_hand:
        charge = _at_hand(plan, around, shift, delta)
    else:
        charge = epsilon(plan, steps, delta, dimension=dimension).epsilon.upper
    return Audit.of(scores, charge, delta, confidence)


def clipped(plan: Plan, touched: int) -> Array:
    """Clipped gradient of the record, with all of its coordinates."""
    bare = torch.full((1, touched), copies.STRENGTH, dtype=torch.float64)
    tape = GradientTape(terms={"rows": Dense(bare)}, device=bare.device)
    return np.asarray(plan.clipping.clip(tape).total["rows"].numpy())


def log_ratio(plan: Plan, outputs: Array, shift: Array, around: Array) -> Array:
    """Log-likelihood ratio of each row of outputs, with the record over without: the optimal score.

    For noise on a fixed support, that of the whole normal law; any score makes a valid audit.
    """
    rate, coordinate_rate = plan.sampling.participation, plan.sampling.coordinate_participation
    powers, scales = _law(plan, len(shift))
    centred = outputs.reshape(len(outputs), -1, len(shift)) - around
    by_coordinate = (np.abs(centred) ** powers - np.abs(centred - shift) ** powers) / scales**powers
    if coordinate_rate < 1:
        by_coordinate = np.logaddexp(
            math.log1p(-coordinate_rate), math.log(coordinate_rate) + by_coordinate
        )
    by_step = by_coordinate.sum(2)
    if rate < 1:
        by_step = np.logaddexp(math.log1p(-rate), math.log(rate) + by_step)
    return np.asarray(by_step.sum(1))


def _law(plan: Plan, touched: int) -> tuple[Array, Array]:
    """Exponent and scale of the noise at each number: its density is ~ exp(-|x / scale|^exponent)."""
    laws = []
    for width, (noise, norm) in zip(
        copies.widths(plan, touched),
        plan.noise.per_block(plan.clipping.sensitivity(touched), plan.clipping.reference_norm),
        strict=True,
    ):
        dominating = noise.dominating_noise(1.0)
        law = noise.exponential_power(norm) if dominating is None else dominating.exponential_power(1.0)
        if law is None:
            raise Unsupported(
                f"{type(noise).__name__} has neither a density of its own nor a noise that dominates "
                "it: there is no likelihood ratio to score by. Give it `exponential_power` or "
                "`dominating_noise`."
            )
        laws += [law] * width
    powers, scales = np.array(laws).T
    return powers, scales


def _at_hand(plan: Plan, around: Array, shift: Array, delta: float) -> float:
    """Per-instance charge with the record or without it: either must cover both."""
    worst_case = epsilon(plan, 1, delta, dimension=len(shift)).epsilon.upper
    curves = [individual_rdp(plan, place, ORDERS) for place in (around, around + shift)]
    return min(worst_case, *(rdp_to_epsilon(curve, ORDERS, delta) for curve in curves))
