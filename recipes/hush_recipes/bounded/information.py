"""Fisher information loss: certified spectral norms of the Jacobian of clipped per-sample gradients.

The spectral norm of diag(eta) J, J the Jacobian of a record's clipped gradient with respect to its
input. Neither J nor J^T J is ever materialised.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from hush.accounting.per_instance import fisher, unit_law
from hush.clipping import L2, Linf
from hush.core.errors import InvalidValue, Unproved, Unsupported
from hush.core.parts import Clipping
from hush.core.plan import Plan
from hush.gradients.precision import full_precision

NormalOperator = Callable[[Tensor], Tensor]
"""Multiplies each row by its record's J^T diag(eta^2) J."""


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The largest eigenvalue of J^T diag(eta^2) J for each record: between `lower` and `upper`.

    `upper` fails with probability `failure` at most for each record, over the random start alone.
    """

    lower: Tensor
    upper: Tensor
    failure: float


def power_iteration(
    normal: NormalOperator, start: Tensor, *, iterations: int = 60, failure: float = 1e-6
) -> Spectrum:
    """The largest eigenvalue of a positive semi-definite matrix for each row of `start`.

    **Guarantee.** docs/guarantees/fisher.md, "Certificate": the Rayleigh quotient is a lower bound, and
    1 / (1 - gap) times it an upper one but for `failure`.

    Args:
        normal: multiplies each row by its record's matrix.
        start: (records, dimension), independent normal entries.
        iterations: of the power method.
        failure: probability that the upper bound fails, for each record.
    """
    if iterations < 1 or not 0 < failure < 1:
        raise InvalidValue(
            f"iterations={iterations!r} and failure={failure!r} must be >= 1, and between 0 and 1: "
            "a certificate holds but for a small probability. Pass e.g. iterations=60, failure=1e-6."
        )
    vector = _unit(start)
    for _ in range(iterations):
        vector = _unit(normal(vector))
    lower = (vector * normal(vector)).sum(1).clamp(min=0)
    return Spectrum(
        lower=lower,
        upper=lower / (1 - power_iteration_error(start.shape[1], iterations, failure)),
        failure=failure,
    )


def spectrum(
    model: nn.Module,
    loss: Any,
    inputs: Tensor,
    targets: Tensor,
    clipping: Clipping,
    information: Tensor,
    *,
    generator: torch.Generator | None = None,
    iterations: int = 60,
    failure: float = 1e-6,
) -> Spectrum:
    """Largest eigenvalue of J^T diag(eta^2) J of each record, by vector-Jacobian products alone.

    Args:
        model: any that `torch.func` can take.
        loss: one value per record.
        inputs: of the records, floating-point.
        targets: of the records.
        clipping: `Linf` or `L2`.
        information: eta^2 for each trained entry, the parameters concatenated; or a row of them for each
            record, where the release is at another location with each of them.
        generator: draws the start of the power method.
        iterations: of the power method.
        failure: probability that the upper bound fails, for each record.
    """
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    fixed = {name: value.detach() for name, value in model.named_parameters() if not value.requires_grad}
    clip = _clip(clipping)

    def one_loss(parameters: dict[str, Tensor], value: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, {**fixed, **parameters}, (value[None],))
        value_of_loss: Tensor = loss(outputs, target[None]).sum()
        return value_of_loss

    def clipped(value: Tensor, target: Tensor) -> Tensor:
        gradients = grad(one_loss)(trained, value, target)
        return clip(torch.cat([part.reshape(-1) for part in gradients.values()]))

    start = torch.randn(
        len(inputs), inputs[0].numel(), generator=generator, device=inputs.device, dtype=inputs.dtype
    )
    with full_precision(inputs.device, autograd=True):
        # Recorded once for all products. J v is the transpose of a map that is linear in the weights: no
        # forward mode is needed.
        recorded: Any = vjp(lambda values: vmap(clipped)(values, targets), inputs)
        gradients, vector_jacobian = recorded
        jacobian_vector: Any = vjp(lambda w: vector_jacobian(w)[0], torch.zeros_like(gradients))[1]

        def normal(vectors: Tensor) -> Tensor:
            moved = information * jacobian_vector(vectors.view_as(inputs))[0]
            product: Tensor = vector_jacobian(moved)[0]
            return product.reshape_as(vectors)

        return power_iteration(normal, start, iterations=iterations, failure=failure)


def softmax_regression(
    weights: Tensor, inputs: Tensor, targets: Tensor, limit: float, information: Tensor
) -> NormalOperator:
    """`J^T diag(eta^2) J` of a linear layer under cross-entropy and an l-infinity clip, in closed form.

    The gradient is (p - y) x^T, p the softmax of W x; numbers beyond `limit` do not move with x. With
    S = diag(p) - p p^T, J v = (S W v) x^T + (p - y) v^T.
    """
    probabilities = (inputs @ weights.T).softmax(1)
    error = probabilities - nn.functional.one_hot(targets, weights.shape[0]).to(probabilities.dtype)
    unclipped = (error[:, :, None] * inputs[:, None, :]).abs() < limit
    unclipped_information = information.view_as(weights) * unclipped

    def softmax_jacobian(values: Tensor) -> Tensor:
        return probabilities * (values - (probabilities * values).sum(1, keepdim=True))

    def normal(vectors: Tensor) -> Tensor:
        slope = softmax_jacobian(vectors @ weights.T)
        derivative = slope[:, :, None] * inputs[:, None, :] + error[:, :, None] * vectors[:, None, :]
        moved = unclipped_information * derivative
        back = softmax_jacobian((moved * inputs[:, None, :]).sum(2)) @ weights
        return back + (moved * error[:, :, None]).sum(1)

    return normal


def _clip(clipping: Clipping) -> Callable[[Tensor], Tensor]:
    """The clipping of one gradient as a function that can be differentiated."""
    if type(clipping) is Linf:
        limit = clipping.norm
        return lambda gradient: gradient.clamp(-limit, limit)
    if type(clipping) is L2:
        norm = clipping.norm
        return lambda gradient: gradient * (norm / gradient.norm().clamp(min=norm))
    raise Unproved(
        f"{type(clipping).__name__} has no Jacobian here: what is not differentiated as it is run would "
        "be another mechanism's information. Use Linf or L2."
    )


def _unit(vectors: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors / sizes.clamp(min=torch.finfo(vectors.dtype).tiny)


_POINTS_PER_DEVIATION = 1024
"""Entries of the table per standard deviation."""
_TAIL_DEVIATIONS = 40
"""Standard deviations outside the support where the table ends."""
_MAX_HALF_WIDTH = 1000
ERROR = 1e-6
"""Of the table, over 1/scale^2: a chord of length h is off by h^2/8 times the curvature at most."""


class FisherInformationTable:
    """Fisher information eta^2 of one step of `plan` at any locations (sensitive, as they are).

    **Guarantee.** No less than `hush.fisher`, and no more than twice ERROR/scale^2 above it up to 40
    deviations outside the support; beyond that, its value there. The law is symmetric and has less
    information the farther outside.
    """

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self.scale = unit_law(plan.noise, plan.clipping.reference_norm)[1]
        half = getattr(plan.noise, "bound", 0.0) / self.scale
        if half > _MAX_HALF_WIDTH:
            raise Unsupported(
                f"{plan.noise} reaches {half:.3g} deviations to each side: a draw that never comes near "
                f"its ends is normal. Use Gaussian, or a bound of at most {_MAX_HALF_WIDTH} scales."
            )
        points = int((half + _TAIL_DEVIATIONS) * _POINTS_PER_DEVIATION) + 2
        exact = fisher(plan, np.arange(points) / _POINTS_PER_DEVIATION * self.scale)
        largest = 1 / self.scale**2
        self._table = torch.as_tensor(np.minimum(exact + ERROR * largest, largest), device=device)

    def at(self, location: Tensor) -> Tensor:
        """Fisher information at each location, of their shape and dtype."""
        position = (
            location.abs().mul(_POINTS_PER_DEVIATION / self.scale).clamp_(max=len(self._table) - 1.5)
        )
        below = position.long()
        table = self._table.to(location.dtype)
        return torch.lerp(table[below], table[below + 1], position - below)


def power_iteration_error(dimension: int, iterations: int, failure: float) -> float:
    """Relative error that the power method with a random start exceeds with probability `failure`."""
    if dimension == 1:
        return 0.0
    start, power = math.log(2 * dimension / math.pi) / 2, iterations + 0.5
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        chance = start + (power * math.log1p(-middle) - math.log(middle * 2 * power) / 2)
        low, high = (middle, high) if chance > math.log(failure) else (low, middle)
    return high
