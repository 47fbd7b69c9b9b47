"""Per-instance Rényi divergences and Fisher information loss of the records in a run (sensitive)."""

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

from hush.accounting.epsilon import checked_orders, rdp, upper_epsilon
from hush.accounting.filters import RenyiFilter, individual_gaussian_rdp
from hush.accounting.numerics import Array
from hush.accounting.per_instance import check_always_released, fisher, individual_rdp, unit_law
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.clipping import L2, L2Linf, Linf
from hush.core.errors import CheckpointError, DataError, InvalidValue, Unproved, Unsupported
from hush.core.guarantee import Guarantee
from hush.core.parts import Clipping
from hush.core.plan import Plan
from hush.core.value import check_count
from hush.gradients.precision import full_precision
from hush.gradients.tree import tree_map
from hush.training.data import Batch
from hush.training.step import PrivateStep

_ROUNDING = 1e-4
"""Tolerance for the relative difference of two sums over the same records."""
_ORDERS = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)
_FAILURE = 1e-6  # probability that an eigenvalue exceeds its bound
_ENTRIES = 2**20  # maximum number of entries of clipped gradients in memory


class PerInstance:
    """Per-instance privacy costs, accumulated over the steps of a full-batch plan (sensitive).

    `observe` recomputes the clipped sum t of a batch and the clipped gradient g_i of each record. For
    each order a, it accumulates:

    - `charges[i]`: the larger of D_a(P_t || P_{t - g_i}) and D_a(P_{t - g_i} || P_t), i.e. the cost of
      record i being present or absent;
    - `any_record`: a bound for any one record that is added or removed. This is the per-instance RDP
      "for all" of Algorithm 1 of Hu et al. (2024), with both signs and directions;
    - `worst_case`: the divergence for any data set, `hush.rdp`;
    - `information[i]`: an upper bound on the largest eigenvalue of J_i^T diag(eta^2) J_i, where J_i is
      the Jacobian of g_i with respect to the inputs of record i.

    **Guarantee** (per-instance, for one step given the previous steps). See docs/guarantees/bounded.md
    and fisher.md. A sum over steps is an odometer, not a guarantee. The guarantee of the run is
    `step.spent` (docs/guarantees/filter.md). All numbers are sensitive.

        watched = hush.PerInstance(orders=[2.0, 8.0])
        for batch in step.batches(data, steps=100):
            step(watched.observe(step, batch))
        print(watched.epsilons(delta=1e-5).max())    # sensitive

    Args:
        orders: Rényi orders, each above 1.
        slots: Slots to observe, chosen independently of the records; by default all slots.
        iterations: Number of Lanczos iterations for the Fisher information; 0 to skip it. The result is
            exact if the number is at least the number of inputs. Otherwise `eigenvalue_error` bounds
            the relative error, except with probability 1e-6 per record and step.
        guard: Filter with one record per slot. A record takes part while its Gaussian cost fits the
            budget of the filter, so `guarantee` holds for every record.
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
        self.iterations = check_count(
            "iterations", iterations, "it is a number of iterations", at_least=0
        )
        self.guard = guard
        self.steps = 0
        self.any_record: Array = np.zeros(len(self.orders))
        self.worst_case: Array = np.zeros(len(self.orders))
        self.eigenvalue_error = 0.0
        self._run: tuple[Plan, int] | None = None
        self.charges: Array = np.zeros((0, len(self.orders)))
        self.information: Array = np.zeros(0)

    def epsilons(self, delta: float) -> Array:
        """Per-instance epsilon of each observed record (sensitive; an odometer, not a guarantee).

        The values do not exceed the worst-case epsilon of the observed steps.

        Args:
            delta: Delta of the conversion from Rényi divergences.
        """
        return self._epsilons(self.charges, delta)

    def any_record_epsilon(self, delta: float) -> float:
        """Epsilon for any one record added to or removed from the data, "for all" (sensitive).

        Args:
            delta: Delta of the conversion from Rényi divergences.
        """
        return float(self._epsilons(self.any_record[None], delta)[0])

    def _epsilons(self, charges: Array, delta: float) -> Array:
        # the worst-case epsilon uses more orders, so it may be smaller
        plan, size = self._run or (None, 0)
        most = math.inf if plan is None else upper_epsilon({plan: self.steps}, delta, size)
        return np.array([min(most, rdp_to_epsilon(each, self.orders, delta)) for each in charges])

    def losses(self) -> Array:
        """Upper bounds on the Fisher information loss of the observed records (sensitive).

        The bound is the square root of `information`.
        """
        return np.sqrt(self.information)

    def numbers(self, delta: float) -> dict[str, npt.ArrayLike]:
        """Arrays for `private/per_instance.npz` (sensitive).

        Args:
            delta: Delta of the conversion from Rényi divergences.
        """
        watched = np.arange(len(self.charges)) if self.slots is None else self.slots
        return {
            **{name: value.numpy() for name, value in self.state().items()},
            "slots": watched,
            "delta": delta,
            "epsilon": self.epsilons(delta),
            "any_record_epsilon": self.any_record_epsilon(delta),
            "eta": self.losses(),
        }

    def guarantee(self, delta: float) -> Guarantee:
        """Guarantee for every record by the budget of the guard; it may be published.

        Args:
            delta: Delta of the guarantee.
        """
        if self.guard is None:
            raise Unproved(
                "per-instance costs are not a guarantee. Pass guard=hush.RenyiFilter(...), or report "
                "step.spent(delta)."
            )
        # the proved rounding error is relative to the clipping norm, not to the record's gradient
        return dataclasses.replace(self.guard.guarantee(delta), arithmetic="assumed")

    def state(self) -> dict[str, Tensor]:
        """Accumulated costs for a checkpoint (sensitive)."""
        names = ("steps", "orders", "charges", "any_record", "worst_case", "information")
        numbers = {name: getattr(self, name) for name in names} | {
            "slots": np.zeros(0, dtype=np.int64) if self.slots is None else self.slots,
            "spent": np.zeros(0) if self.guard is None else self.guard.odometer(),
        }
        return {name: torch.from_numpy(np.array(value)) for name, value in numbers.items()}

    def restore(self, state: Mapping[str, Tensor] | None, steps: int) -> None:
        """Restore the costs of an interrupted run.

        Args:
            state: Output of `state` of an object with the same arguments; None if no state was stored.
            steps: Number of steps of the run.
        """
        stored = {name: value.numpy() for name, value in (state or {}).items()}
        mine = {name: value.numpy() for name, value in self.state().items()}
        same = mine.keys() == stored.keys()
        same &= all(np.array_equal(mine[name], stored.get(name, 0)) for name in ("orders", "slots"))
        done = int(stored.get("steps", 0))
        if not same or done != steps or mine["spent"].shape != stored["spent"].shape:
            raise CheckpointError(
                f"the stored per-instance costs cover {done} steps and the run has {steps}, or the "
                "orders, slots or guard differ. Pass the arguments of the interrupted run, or leave "
                "out per_instance=."
            )
        self.steps = steps
        for name in ("charges", "any_record", "worst_case", "information"):
            setattr(self, name, stored[name].copy())
        if self.guard is not None:
            self.guard.restore(stored["spent"])

    def check(self, step: PrivateStep, slots: int) -> None:
        """Raise if the per-instance costs of a step cannot be computed.

        Args:
            step: Step to observe.
            slots: Number of slots of its data.
        """
        individual_rdp(step.plan, [0.0], self.orders)  # raises if there is no proof
        check_always_released(step.plan)
        self._run = step.plan, step.size
        if step.reducer.size > 1 or step.units is not None or step.gradients.views is not None:
            raise Unsupported(
                "per-instance costs are for single records in one process. Leave out units= and views=, "
                "and pass distributed=hush.Distributed(processes=False)."
            )
        if self.slots is not None and len(self.slots) and not 0 <= self.slots[-1] < slots:
            raise InvalidValue(
                f"slots={self.slots[-1]} must be below the {slots} slots of the data. Pass e.g. "
                f"slots=range({min(100, slots)}).",
                key="slots",
            )
        if self.guard is not None and self.guard.records != slots:
            raise InvalidValue(
                f"the guard is for {self.guard.records} records, but must have one record for each of "
                f"the {slots} slots, because each record has a separate budget. Pass "
                f"guard=hush.RenyiFilter(orders=..., budget=..., records={slots}).",
                key="guard",
            )

    def observe(self, step: PrivateStep, batch: Batch) -> Batch:
        """Add the costs of the next step; call it before the step runs.

        Args:
            step: Step in one process, without units or views. Its plan must have full batches, `L2`,
                `Linf` or `L2Linf` clipping, and Gaussian or bounded-support noise.
            batch: Current batch of `step.batches`.

        Returns:
            Batch for the step, without the records that the guard excludes.
        """
        if batch is not step.pending_batch:
            raise DataError(
                "this batch is not the next one of the step. Call observe() before step(batch)."
            )
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
                "two passes over the records gave different gradients, so forward passes are random and "
                "the location of the step is unknown. Set dropout to 0, or call model.eval()."
            )
        self.any_record += individual_rdp(plan, location, self.orders)
        self.worst_case += rdp(plan, self.orders, step.size)
        self.steps += 1
        return batch

    def _clipped(
        self, step: PrivateStep, batch: Batch
    ) -> Iterator[tuple[Array, npt.NDArray[np.int64], Any, Tensor]]:
        """Chunks of records: clipped gradients, positions in the batch, inputs and targets."""
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
            raise Unsupported(
                "Fisher information needs inputs that are one floating-point tensor. Pass such inputs, "
                "or iterations=0."
            )
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
            # compute J v as the transpose of the vector-Jacobian product, without forward-mode autograd
            zero = torch.zeros_like(gradients)
            forward: Any = vjp(lambda cotangent: transposed(cotangent)[0], zero)[1]
            vectors = torch.randn_like(inputs).flatten(1)
            size = min(self.iterations, vectors.shape[1])
            basis, images = (vectors.new_zeros(len(vectors), size, vectors.shape[1]) for _ in range(2))
            for k in range(size):
                for attempt in range(3):  # repeat, because the first orthogonalisation rounds
                    vectors = torch.nn.functional.normalize(vectors, dim=1)
                    shares = basis @ vectors[:, :, None]
                    vectors = vectors - (shares * basis).sum(1)
                    if not attempt:  # an invariant span leaves only rounding errors: draw a new vector
                        rest = vectors.norm(dim=1, keepdim=True)
                        vectors = torch.where(rest < 1e-5, torch.randn_like(vectors), vectors)
                basis[:, k] = vectors = torch.nn.functional.normalize(vectors, dim=1)
                products = transposed(eta * forward(vectors.view_as(inputs))[0])[0].flatten(1)
                images[:, k] = vectors = products
        # Rayleigh-Ritz: project the matrix onto the span of the vectors
        projected = (basis @ images.mT).double().cpu()
        largest = torch.linalg.eigvalsh((projected + projected.mT) / 2)[:, -1].clamp(min=0)
        self.eigenvalue_error = lanczos_error(vectors.shape[1], size, _FAILURE)
        return np.asarray(largest) / (1 - self.eigenvalue_error)


def clip_rows(clipping: Clipping, rows: Tensor) -> Tensor:
    """Clip finite gradients (rows) by `L2`, `Linf` or `L2Linf`."""
    if isinstance(clipping, L2 | L2Linf):
        norm = clipping.norm if isinstance(clipping, L2) else clipping.l2
        rows = rows * (norm / rows.norm(dim=1, keepdim=True).clamp(min=norm))
    if isinstance(clipping, Linf | L2Linf):
        limit = clipping.norm if isinstance(clipping, Linf) else clipping.linf
        rows = rows.clamp(-limit, limit)
    return rows


def lanczos_error(dimension: int, iterations: int, failure: float) -> float:
    """Relative error of Lanczos iterations from a random start, with failure probability `failure`."""
    if iterations >= dimension:
        return 0.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        degree, root = 2 * (iterations - 1) * math.atanh(math.sqrt(middle)), (1 - middle) / middle
        # uses log(2) - degree as an upper bound on log(1 / cosh(degree))
        chance = math.log(2 * dimension / math.pi * root) / 2 + math.log(2) - degree
        low, high = (middle, high) if chance > math.log(failure) else (low, middle)
    return high
