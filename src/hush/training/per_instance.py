"""Per-instance Rényi charges and Fisher information loss of the records of a run (sensitive)."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp, vmap

from hush.accounting.epsilon import checked_orders
from hush.accounting.numerics import Array
from hush.accounting.per_instance import fisher, individual_rdp
from hush.clipping import L2, L2Linf, Linf
from hush.core.errors import DataError, Unsupported
from hush.gradients.precision import full_precision
from hush.gradients.tree import tree_map
from hush.training.data import Batch
from hush.training.step import PrivateStep

_ROUNDING = 1e-4
"""Relative distance of two sums of the same records beyond which forward passes draw."""
_ENTRIES = 2**20
"""Entries of clipped gradients that are held at a time."""


class PerInstance:
    """Per-instance costs of the records, accumulated over the steps of a full-batch plan (sensitive).

    `observe` recomputes the clipped sum of a batch, and then each record's clipped gradient g_i, a few
    at a time. With the sum as location t it adds, for each order a:

    - to `charges[i]`, the larger of D_a(P_t || P_{t - g_i}) and D_a(P_{t - g_i} || P_t): record i;
    - to `any_record`, the bound for any one record that is added or removed;
    - to `information[i]`, the largest eigenvalue of J_i^T diag(eta^2) J_i, J_i the Jacobian of g_i with
      respect to the record's inputs. Its root is the Fisher information loss.

    **Guarantee** (per-instance, of one step given those before it). docs/guarantees/bounded.md and
    fisher.md. A sum over steps is an odometer of one run and no guarantee of the run, which is what
    `step.spent` states: docs/guarantees/filter.md. Every number depends on the records and is private:
    nothing here prints or stores it.

        watched = PerInstance(step, orders=[2.0, 8.0])
        for batch in step.batches(data, steps=100):
            watched.observe(batch)
            step(batch)
        print(watched.charges.max(0))                # for the holder of the data alone

    Args:
        step: Step of a plan with full batches, `L2`, `Linf` or `L2Linf` clipping, and noise of bounded
            support or Gaussian; of one process, without units or views.
        orders: Rényi orders, each above 1.
        iterations: Power iterations of the information; 0: no information is computed.
        failure: Probability that an eigenvalue exceeds the number added for it.
    """

    def __init__(
        self,
        step: PrivateStep,
        orders: npt.ArrayLike,
        *,
        iterations: int = 0,
        failure: float = 1e-6,
    ) -> None:
        if step.reducer.size > 1 or step.units is not None or step.gradients.views is not None:
            raise Unsupported(
                "per-instance charges are of single records whose gradients one process computes. Leave "
                "out units= and views=, and pass processes=False."
            )
        individual_rdp(step.plan, [0.0], orders)  # raises if it is not proved
        self.step, self.orders = step, checked_orders(orders)
        self.iterations, self.failure = iterations, failure
        self.steps = 0
        self.any_record: Array = np.zeros(len(self.orders))
        self.charges: Array = np.zeros((0, len(self.orders)))
        self.information: Array = np.zeros(0)

    def observe(self, batch: Batch) -> None:
        """Add the costs of the next step; call it before the step runs.

        Args:
            batch: Batch just drawn by `step.batches`.
        """
        if batch is not self.step.pending_batch:
            raise DataError("this batch is not the next one of the step. Observe it before step(batch).")
        plan, width = self.step.plan, len(self.orders)
        location, again = np.zeros(self.step.size), np.zeros(self.step.size)
        for gradients, _, _, _ in self._clipped(batch):
            location += gradients.sum(0)
        eta = torch.from_numpy(fisher(plan, location)) if self.iterations else None
        charges, information = np.zeros((len(batch), width)), np.zeros(len(batch))
        for gradients, rows, inputs, targets in self._clipped(batch):
            again += gradients.sum(0)
            charges[rows] = individual_rdp(plan, location, self.orders, change=-gradients)
            if eta is not None:
                information[rows] = self._eigenvalues(inputs, targets, eta)
        if np.linalg.norm(again - location) > _ROUNDING * max(1e-12, float(np.linalg.norm(location))):
            raise Unsupported(
                "two passes over the records gave other gradients: forward passes draw at random, and "
                "the location of the step is unknown. Set dropout to 0, or call model.eval()."
            )
        self.charges = self.charges + charges if self.steps else charges
        self.information = self.information + information if self.steps else information
        self.any_record += individual_rdp(plan, location, self.orders)
        self.steps += 1

    def _clipped(self, batch: Batch) -> Iterator[tuple[Array, Array, Any, Tensor]]:
        """Clipped gradients of a few records, a row each, their places in the batch, and the records."""
        clipping, names = self.step.plan.clipping, list(self.step.trainable())
        few = max(1, _ENTRIES // self.step.size)
        first = 0
        for part in batch:
            inputs, targets, present, _ = tree_map(part, self.step.gradients.to_device)
            tape = self.step.gradients.record(inputs, targets)
            kept = torch.arange(tape.records) if present is None else present.nonzero().flatten().cpu()
            for rows in kept.split(few):
                totals = [clipping.clip(tape.take(slice(row, row + 1))).total for row in rows.tolist()]
                flat = [torch.cat([one[name].flatten() for name in names]) for one in totals]
                values = torch.stack(flat).double().cpu().numpy()
                some = tree_map((inputs, targets), lambda value, rows=rows: value[rows])  # type: ignore[misc]
                yield values, (first + rows).numpy(), *some
            first += tape.records

    def _eigenvalues(self, inputs: Any, targets: Tensor, eta: Tensor) -> Array:
        """Upper bounds on the largest eigenvalue of J^T diag(eta^2) J of each record."""
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise Unsupported("Fisher information is about one floating-point tensor of inputs.")
        model, loss, clipping = self.step.model, self.step.gradients.loss, self.step.plan.clipping
        named = {name: value.detach() for name, value in model.named_parameters()}
        trained = {name: named[name] for name in self.step.trainable()}
        eta = eta.to(inputs)

        def one_loss(parameters: dict[str, Tensor], value: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(model, {**named, **parameters}, (value[None],))
            result: Tensor = loss(outputs, target[None]).sum()
            return result

        def clipped(value: Tensor, target: Tensor) -> Tensor:
            gradients = grad(one_loss)(trained, value, target)
            flat = torch.cat([part.reshape(-1) for part in gradients.values()])
            if isinstance(clipping, L2 | L2Linf):
                norm = clipping.norm if isinstance(clipping, L2) else clipping.l2
                flat = flat * (norm / flat.norm().clamp(min=norm))
            if isinstance(clipping, Linf | L2Linf):
                limit = clipping.norm if isinstance(clipping, Linf) else clipping.linf
                flat = flat.clamp(-limit, limit)
            return flat

        with full_precision(inputs.device, autograd=True):
            recorded: Any = vjp(lambda values: vmap(clipped)(values, targets), inputs)
            gradients, transposed = recorded
            # J v is the transpose of a map that is linear in the cotangent: no forward mode is needed
            zero = torch.zeros_like(gradients)
            forward: Any = vjp(lambda cotangent: transposed(cotangent)[0], zero)[1]
            vectors = torch.randn_like(inputs).flatten(1)
            for _ in range(self.iterations + 1):
                vectors = torch.nn.functional.normalize(vectors, dim=1)
                products = transposed(eta * forward(vectors.view_as(inputs))[0])[0].flatten(1)
                quotients = (vectors * products).sum(1).clamp(min=0)
                vectors = products
        error = power_iteration_error(vectors.shape[1], self.iterations, self.failure)
        return np.asarray(quotients.double().cpu()) / (1 - error)


def power_iteration_error(dimension: int, iterations: int, failure: float) -> float:
    """Relative error that a random start of the power method exceeds with probability `failure`."""
    if dimension == 1:
        return 0.0

    def log_probability(error: float) -> float:
        power = (iterations + 0.5) * math.log1p(-error) - math.log(error * (2 * iterations + 1)) / 2
        return math.log(2 * dimension / math.pi) / 2 + power

    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if log_probability(middle) > math.log(failure) else (low, middle)
    return high
