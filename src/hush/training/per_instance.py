"""Per-instance Rényi charges and Fisher information loss of the records of a run (sensitive)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp, vmap

from hush.accounting.epsilon import checked_orders
from hush.accounting.filters import RenyiFilter, individual_gaussian_rdp
from hush.accounting.numerics import Array
from hush.accounting.per_instance import check_always_released, fisher, individual_rdp, unit_law
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.clipping import L2, L2Linf, Linf
from hush.core.errors import CheckpointError, DataError, InvalidValue, Unproved, Unsupported
from hush.core.guarantee import Guarantee
from hush.core.parts import Clipping
from hush.core.value import check_count
from hush.gradients.precision import full_precision
from hush.gradients.tree import tree_map
from hush.training.data import Batch
from hush.training.step import PrivateStep

_ROUNDING = 1e-4  # relative distance of two sums of the same records beyond which forward passes draw
_ORDERS = (2.0, 4.0, 8.0, 16.0, 32.0)
_FAILURE = 1e-6  # probability that an eigenvalue exceeds the number added for it
_ENTRIES = 2**20  # entries of clipped gradients that are held at a time


class PerInstance:
    """Per-instance costs of records, accumulated over the steps of a full-batch plan (sensitive).

    `observe` recomputes the clipped sum of a batch and each record's clipped gradient g_i, a few at a
    time. With the sum as location t it adds, for each order a:

    - to `charges[i]`, the larger of D_a(P_t || P_{t - g_i}) and D_a(P_{t - g_i} || P_t): record i;
    - to `any_record`, the bound for any one record that is added or removed (Algorithm 1 of Hu et al.
      2024, with both signs and directions);
    - to `information[i]`, the largest eigenvalue of J_i^T diag(eta^2) J_i, J_i the Jacobian of g_i with
      respect to the record's inputs.

    **Guarantee** (per-instance, of one step given the steps before it). docs/guarantees/bounded.md and
    fisher.md. A sum over steps is an odometer of one run, whose guarantee is `step.spent`:
    docs/guarantees/filter.md. Every number is private.

        watched = hush.PerInstance(orders=[2.0, 8.0])
        for batch in step.batches(data, steps=100):
            step(watched.observe(step, batch))
        print(watched.epsilons(delta=1e-5).max())    # for the holder of the data alone

    Args:
        orders: Rényi orders, each above 1.
        slots: Slots of the data to watch, chosen without looking at the records; None: all.
        iterations: Power iterations of the information; 0: no information is computed.
        guard: Filter of as many records as the data has slots. A record takes part only while its own
            Gaussian cost fits the filter's budget, so `guarantee` holds for every record.
    """

    def __init__(
        self,
        orders: npt.ArrayLike = _ORDERS,
        *,
        slots: npt.ArrayLike | None = None,
        iterations: int = 0,
        guard: RenyiFilter | None = None,
    ) -> None:
        self.orders = checked_orders(orders)
        self.slots = None if slots is None else np.unique(np.asarray(slots, dtype=np.int64))
        self.iterations = check_count("iterations", iterations, "they are counted", at_least=0)
        self.guard = guard
        self.steps = 0
        self.any_record: Array = np.zeros(len(self.orders))
        self.charges: Array = np.zeros((0, len(self.orders)))
        self.information: Array = np.zeros(0)

    def epsilons(self, delta: float) -> Array:
        """Epsilon of each watched record's accumulated charge (sensitive; an odometer, no guarantee).

        Args:
            delta: Delta of the conversion from Rényi divergences.
        """
        return np.array([rdp_to_epsilon(charge, self.orders, delta) for charge in self.charges])

    def losses(self) -> Array:
        """Fisher information loss of each watched record: the root of its information (sensitive)."""
        return np.sqrt(self.information)

    def guarantee(self, delta: float) -> Guarantee:
        """Guarantee of the guard's budget, for every record; it may be published.

        Args:
            delta: Delta of the guarantee.
        """
        if self.guard is None:
            raise Unproved(
                "charges that depend on the records add up to no guarantee. Pass "
                "guard=hush.RenyiFilter(...), or report step.spent(delta)."
            )
        # rounding of a sum is a share of the clipping norm, and not of a record's own gradient
        return dataclasses.replace(self.guard.guarantee(delta), arithmetic="assumed")

    def state(self) -> dict[str, Tensor]:
        """The accumulated numbers (sensitive), to continue a run."""
        names = ("steps", "orders", "charges", "any_record", "information")
        numbers = {name: getattr(self, name) for name in names} | {
            "slots": np.zeros(0, dtype=np.int64) if self.slots is None else self.slots,
            "spent": np.zeros(0) if self.guard is None else self.guard.odometer(),
        }
        return {name: torch.from_numpy(np.array(value)) for name, value in numbers.items()}

    def restore(self, state: Mapping[str, Tensor] | None, steps: int) -> None:
        """Continue from the numbers of an interrupted run.

        Args:
            state: Result of `state` of an object with the same arguments; None: none was stored.
            steps: Number of steps of the run.
        """
        stored = {name: value.numpy() for name, value in (state or {}).items()}
        mine = {name: value.numpy() for name, value in self.state().items()}
        same = all(np.array_equal(mine[name], stored.get(name, 0)) for name in ("orders", "slots"))
        done = int(stored.get("steps", 0))
        if not same or done != steps or mine["spent"].shape != stored["spent"].shape:
            raise CheckpointError(
                f"the stored per-instance charges cover {done} steps, and the run has done "
                f"{steps}; or orders, slots or guard differ. Pass the arguments of the interrupted run, "
                "or leave out per_instance=."
            )
        self.steps = steps
        for name in ("charges", "any_record", "information"):
            setattr(self, name, stored[name].copy())
        if self.guard is not None:
            self.guard.restore(stored["spent"])

    def check(self, step: PrivateStep, slots: int) -> None:
        """Raise if the charges of a step cannot be computed.

        Args:
            step: Step to observe.
            slots: Number of slots of its data.
        """
        individual_rdp(step.plan, [0.0], self.orders)  # raises if it is not proved
        check_always_released(step.plan)
        if step.reducer.size > 1 or step.units is not None or step.gradients.views is not None:
            raise Unsupported(
                "per-instance charges are computed for single records, in one process. Leave out units= "
                "and views=, and pass distributed=hush.Distributed(processes=False)."
            )
        if self.slots is not None and len(self.slots) and not 0 <= self.slots[-1] < slots:
            raise InvalidValue(
                f"slots={self.slots[-1]} must be below the {slots} slots of the data. Pass e.g. "
                f"slots=range({min(100, slots)}).",
                key="slots",
            )
        if self.guard is not None and (self.guard.records != slots or self.guard.knows != "record"):
            raise InvalidValue(
                f"guard of {self.guard.records} records must have one for each of the {slots} slots, "
                'and knows="record": otherwise the admission of a record depends on others. Pass '
                f"guard=hush.RenyiFilter(orders=..., budget=..., records={slots}).",
                key="guard",
            )

    def observe(self, step: PrivateStep, batch: Batch) -> Batch:
        """Add the costs of the next step; call it before the step runs.

        Args:
            step: Step of a plan with full batches, `L2`, `Linf` or `L2Linf` clipping, and noise of
                bounded support or Gaussian; of one process, without units or views.
            batch: Batch just drawn by `step.batches`.

        Returns:
            The batch to pass to the step: without the records that the guard does not admit.
        """
        if batch is not step.pending_batch:
            raise DataError("this batch is not the next one of the step. Observe it before step(batch).")
        plan = step.plan
        self.check(step, len(batch))
        if self.guard is not None:
            norms = np.zeros(len(batch))
            for gradients, rows, *_ in self._clipped(step, batch):
                norms[rows] = np.linalg.norm(gradients, axis=1)
            _, scale = unit_law(plan.noise, plan.clipping.reference_norm)
            admitted = self.guard.admit(individual_gaussian_rdp(norms, scale, self.guard.orders))
            mask = torch.from_numpy(admitted)
            present = mask if batch.present is None else mask & batch.present
            batch = step.pending_batch = dataclasses.replace(batch, present=present)
        location, again = np.zeros(step.size), np.zeros(step.size)
        for gradients, *_ in self._clipped(step, batch):
            location += gradients.sum(0)
        eta = torch.from_numpy(fisher(plan, location)) if self.iterations else None
        watched = np.arange(len(batch)) if self.slots is None else self.slots
        if not self.steps:
            self.charges = np.zeros((len(watched), len(self.orders)))
            self.information = np.zeros(len(watched))
        for gradients, rows, inputs, targets in self._clipped(step, batch):
            again += gradients.sum(0)
            kept = np.isin(rows, watched)
            if not kept.any():
                continue
            places = np.searchsorted(watched, rows[kept])
            self.charges[places] += individual_rdp(plan, location, self.orders, change=-gradients[kept])
            if eta is not None:
                chosen = torch.from_numpy(np.flatnonzero(kept)).to(targets.device)
                few = partial(torch.index_select, dim=0, index=chosen)
                some = tree_map(inputs, few), few(targets)
                self.information[places] += self._eigenvalues(step, *some, eta)
        if np.linalg.norm(again - location) > _ROUNDING * max(1e-12, float(np.linalg.norm(location))):
            raise Unsupported(
                "two passes over the records gave other gradients: forward passes draw at random, and "
                "the location of the step is unknown. Set dropout to 0, or call model.eval()."
            )
        self.any_record += individual_rdp(plan, location, self.orders)
        self.steps += 1
        return batch

    def _clipped(
        self, step: PrivateStep, batch: Batch
    ) -> Iterator[tuple[Array, npt.NDArray[np.int64], Any, Tensor]]:
        """Clipped gradients of a few records, a row each, their places in the batch, and the records."""
        names, clipping, first = list(step.trainable()), step.plan.clipping, 0
        for part in batch.physical_batches():
            inputs, targets, present, _ = tree_map(part, step.gradients.to_device)
            tape = step.gradients.record(inputs, targets)
            for few, gradients in tape.chunks(_ENTRIES):
                rows = torch.arange(tape.records, device=tape.device)[few]
                flat = torch.cat([gradients[name].flatten(1).double() for name in names], 1)
                flat = clip_rows(clipping, flat.where(flat.isfinite().all(1, keepdim=True), 0.0))
                if present is not None:
                    kept = present[rows]
                    rows, flat = rows[kept], flat[kept]
                some = tree_map((inputs, targets), lambda value, rows=rows: value[rows])  # type: ignore[misc]
                yield flat.cpu().numpy(), (first + rows).cpu().numpy(), *some
            first += tape.records

    def _eigenvalues(self, step: PrivateStep, inputs: Any, targets: Tensor, eta: Tensor) -> Array:
        """Upper bounds on the largest eigenvalue of J^T diag(eta^2) J of each record."""
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise Unsupported("Fisher information is about one floating-point tensor of inputs.")
        model, loss, clipping = step.model, step.gradients.loss, step.plan.clipping
        named = {name: value.detach() for name, value in model.named_parameters()}
        trained = {name: named[name] for name in step.trainable()}
        eta = eta.to(inputs)

        def clipped(value: Tensor, target: Tensor) -> Tensor:
            def one_loss(parameters: dict[str, Tensor]) -> Tensor:
                outputs = functional_call(model, {**named, **parameters}, (value[None],))
                return loss(outputs, target[None]).sum()

            flat = torch.cat([part.reshape(-1) for part in grad(one_loss)(trained).values()])
            return clip_rows(clipping, flat[None])[0]

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
        error = power_iteration_error(vectors.shape[1], self.iterations, _FAILURE)
        return np.asarray(quotients.double().cpu()) / (1 - error)


def clip_rows(clipping: Clipping, rows: Tensor) -> Tensor:
    """Finite gradients clipped by `L2`, `Linf` or `L2Linf`, a row each."""
    if isinstance(clipping, L2 | L2Linf):
        norm = clipping.norm if isinstance(clipping, L2) else clipping.l2
        rows = rows * (norm / rows.norm(dim=1, keepdim=True).clamp(min=norm))
    if isinstance(clipping, Linf | L2Linf):
        limit = clipping.norm if isinstance(clipping, Linf) else clipping.linf
        rows = rows.clamp(-limit, limit)
    return rows


def power_iteration_error(dimension: int, iterations: int, failure: float) -> float:
    """Relative error that a random start of the power method exceeds with probability `failure`."""
    if dimension == 1:
        return 0.0
    start, power = math.log(2 * dimension / math.pi) / 2, iterations + 0.5
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        chance = start + (power * math.log1p(-middle) - math.log(middle * 2 * power) / 2)
        low, high = (middle, high) if chance > math.log(failure) else (low, middle)
    return high
