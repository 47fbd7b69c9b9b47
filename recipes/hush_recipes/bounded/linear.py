"""Private gradient descent of a linear classifier on fixed features, every gradient in closed form.

A record's gradient is the outer product of its error and its features, so clamping each number of it
takes one pass over the products and nothing is kept: 50,000 records of 1280 features and 10 classes
take a second or two a step on one core.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hush.accounting.epsilon import checked_orders, rdp
from hush.accounting.filters import RenyiFilter, individual_gaussian_rdp
from hush.accounting.ledger import Ledger
from hush.accounting.numerics import Array
from hush.accounting.per_instance import individual_rdp, unit_law
from hush.clipping import Linf
from hush.core.errors import DataError, Unproved, Unsupported
from hush.core.guarantee import Guarantee, Neighbours, Secrecy, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.randomness import derive_source, source_for
from hush.core.value import check_count
from hush.sampling import FullBatch
from hush.training.distributed.processes import check_first_rank
from hush.training.fingerprint import fingerprint

_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
"""Products worked on at once: few enough to stay in the cache, or as many as keep a GPU busy."""


@dataclass(frozen=True, kw_only=True)
class Charges:
    """Per-instance RDP of the records at hand, summed over the steps (sensitive, and no guarantee).

    Locations depend on earlier releases, so the sum of one run bounds nothing for another:
    docs/guarantees/filter.md.
    """

    orders: Array
    for_all: Array
    """RDP of any record added or removed, at each order."""
    each: Array
    """RDP of each record, a row: no more than for all, and no more than its own norms cost."""


class LinearDescent:
    """Full-batch descent with momentum on the cross-entropy of `inputs @ weights.T`, weights from zero.

    **Guarantee.** The weights after every step satisfy `spent(delta)`: each step is the plan's mechanism
    on the clamped sum, divided by the number of records, which is public. docs/guarantees/bounded.md.

    With an `individual` filter every record has a budget of its own, and is left out of the steps that
    it cannot afford: docs/guarantees/filter.md. The number of steps may then be any.

        descent = LinearDescent(inputs, targets, plan, classes=10, lr=16.0)
        for weights in descent.run(steps=20):
            ...
        print(descent.spent(delta=1e-5))
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        plan: Plan,
        *,
        classes: int,
        lr: float,
        momentum: float = 0.9,
        ledger: Ledger | None = None,
        generator: torch.Generator | None = None,
        orders: npt.ArrayLike = (),
        individual: RenyiFilter | None = None,
    ) -> None:
        if type(plan.clipping) is not Linf or type(plan.sampling) is not FullBatch:
            raise Unsupported(
                f"{type(plan.sampling).__name__} x {type(plan.clipping).__name__} is not run in closed "
                "form: every record, each number clamped. Use FullBatch and Linf, or PrivateStep."
            )
        if type(plan.release) is not Always:
            raise Unsupported(
                f"release={type(plan.release).__name__} is not run in closed form: every step is "
                "released, untested, so what is charged would not be what runs. Leave out release=, or "
                "use PrivateStep."
            )
        if inputs.ndim != 2 or targets.shape != inputs.shape[:1] or not bool(inputs.isfinite().all()):
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)} "
                "must be a row of finite features and a class for each record: what is no number has no "
                "gradient."
            )
        self.inputs, self.targets, self.plan = inputs, targets, plan
        classes = check_count("classes", classes, "each has a row of weights", at_least=2)
        self.weights = inputs.new_zeros(classes, inputs.shape[1])
        self.lr, self.momentum = lr, momentum
        self._velocity = torch.zeros_like(self.weights)
        rdp(plan, [2.0], self.weights.numel())  # raises for a plan that cannot be charged
        check_first_rank(type(self).__name__)
        self.ledger = Ledger() if ledger is None else ledger
        self.ledger.check_adjacency()
        source = source_for(inputs.device, generator)
        self.generator = derive_source(source, self.ledger.stream_label())
        self._randomness: Secrecy = "secret" if generator is None else "seeded"
        self._run, self._steps = secrets.token_hex(8), 0
        self._few = (
            len(inputs) <= 2**18
        )  # so that sums in double precision round within what is paid for
        if individual is not None and individual.records != len(inputs):
            raise Unproved(
                f"the filter is for {individual.records} records: here each of {len(inputs)} has its "
                f"own. Pass RenyiFilter(records={len(inputs)})."
            )
        self.individual = individual
        self._orders = checked_orders(orders) if np.size(orders) else np.zeros(0)
        self._for_all = np.zeros(len(self._orders))
        self._each = np.zeros((len(inputs), len(self._orders)))

    def run(self, steps: int) -> Iterator[Tensor]:
        """Weights after each step, which may be published.

        Args:
            steps: to take.
        """
        for _ in range(check_count("steps", steps, "they are counted", at_least=1)):
            total = self._step_sum()
            # more than what rounding in double precision adds to a record: docs/guarantees/tape.md
            flat = total.reshape(-1).mul_(1 - 2.0**-16)
            noisy = self.plan.noise.privatize(
                flat, norm=self.plan.clipping.reference_norm, generator=self.generator
            )
            update = noisy.div_(self.plan.sampling.expected(len(self.inputs)))
            self.ledger.charge(
                self.plan,
                run=self._run,
                step=self._steps + 1,
                release=fingerprint([update]),
                dimension=self.weights.numel(),
                arithmetic="proved" if self.plan.noise.exact and self._few else "assumed",
                randomness=self._randomness,
                records=len(self.inputs),
            )
            self._steps += 1
            self._velocity.mul_(self.momentum).add_(update.view_as(self.weights).to(self.weights.dtype))
            self.weights = self.weights - self.lr * self._velocity
            yield self.weights

    def spent(self, delta: float, *, group: int = 1, neighbours: Neighbours | None = None) -> Guarantee:
        """(epsilon, delta) guarantee of all on the ledger, or the filter's budget where that is less.

        The filter knows of its own steps alone: with any other on the ledger its budget says nothing. It
        is a budget of one record, and says nothing of several.

        Args:
            delta: of the guarantee.
            group: number of units of privacy that change together.
            neighbours: adjacency relation; None: the one that is charged.
        """
        check_delta(delta, len(self.inputs))
        charged = self.ledger.epsilon(delta, group=group, neighbours=neighbours)
        single = charged.neighbours is Neighbours.ZERO_OUT and group == 1
        if self.individual is None or not single or sum(self.ledger.counts.values()) != self._steps:
            return charged
        # what ran is on the ledger; the filter does not know how its steps' noise was drawn
        filtered = replace(
            self.individual.guarantee(delta),
            arithmetic=charged.arithmetic,
            randomness=charged.randomness,
            records=charged.records,
        )
        return min(charged, filtered, key=lambda each: each.epsilon.upper)

    def charges(self) -> Charges:
        """Per-instance RDP of the records at hand, at the `orders` asked for (sensitive)."""
        each = np.minimum(self._each, self._for_all)
        return Charges(orders=self._orders, for_all=self._for_all.copy(), each=each)

    def _step_sum(self) -> Tensor:
        """Sum of the clamped gradients of those who take part; its per-instance RDP is added up."""
        if self.individual is None:
            total, squares = self._clamped()
        else:
            # a first pass for the norms, by which each record alone is let in or left out
            _, squares = self._clamped()
            deviation = unit_law(self.plan.noise, self.plan.clipping.reference_norm)[1]
            price = individual_gaussian_rdp(
                squares.sqrt().cpu().numpy(), deviation, self.individual.orders
            )
            admitted = torch.as_tensor(self.individual.admit(price), device=squares.device)
            total, squares = self._clamped(admitted)
        if len(self._orders):
            self._add_charges(total, squares)
        return total

    def _clamped(self, admitted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum of the clamped per-sample gradients, and the squared norm of each."""
        limit = self.plan.clipping.reference_norm
        logits = self.inputs @ self.weights.T
        error = logits.softmax(1) - nn.functional.one_hot(self.targets, len(self.weights))
        # Large features overflow: what is no number would be seen in the sum, whatever the noise.
        error = error.where(error.isfinite().all(1, keepdim=True), 0.0)
        if admitted is not None:
            error = error * admitted[:, None]
        measured = len(self._orders) > 0 or self.individual is not None
        total = torch.zeros(self.weights.shape, dtype=torch.float64, device=self.inputs.device)
        squares = torch.zeros(len(self.inputs), dtype=torch.float64, device=self.inputs.device)
        at_once = _AT_ONCE.get(self.inputs.device.type, _AT_ONCE["cpu"])
        rows = max(1, min(len(self.inputs), at_once // self.inputs.shape[1]))
        product = self.inputs.new_empty(rows, self.inputs.shape[1])
        for start in range(0, len(self.inputs), rows):
            features = self.inputs[start : start + rows]
            clamped = product[: len(features)]
            for k in range(len(self.weights)):
                torch.mul(features, error[start : start + rows, k, None], out=clamped)
                clamped.clamp_(-limit, limit)
                total[k] += clamped.sum(0, dtype=torch.float64)
                if measured:
                    squares[start : start + rows] += torch.linalg.vector_norm(clamped, dim=1) ** 2
        return total, squares

    def _add_charges(self, total: Tensor, squares: Tensor) -> None:
        location = total.reshape(-1).cpu().numpy()
        for_all = individual_rdp(self.plan, location, self._orders)
        deviation = unit_law(self.plan.noise, self.plan.clipping.reference_norm)[1]
        own = individual_gaussian_rdp(squares.sqrt().cpu().numpy(), deviation, self._orders)
        self._for_all += for_all
        self._each += np.minimum(own, for_all)
