"""Checks of the sensitivity of a clipped sum, of charges, and of state that a step leaves behind."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hush.accounting.ledger.ledger import Ledger
from hush.audit.checks.noise import Check, sum_before_noise
from hush.core.errors import Unsupported
from hush.core.randomness import SystemSource
from hush.core.ranges import check_count
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Batch, Data, take
from hush.training.step import PrivateStep

_LENGTHS = (1.0, 1e4, 1e8)
"""What losses are multiplied by, in clipping norms: rules for far outliers must hold as well."""


def influence(
    step: PrivateStep,
    batch: Batch,
    *,
    places: Sequence[int] | None = None,
    lengths: Sequence[float] = _LENGTHS,
) -> Check:
    """Whether emptying a record's slot takes its own clipped gradient from the sum, and that alone.

    With the same coins, masks and dropout, and with gradients of several lengths: the sum moves within
    the plan's sensitivity set and the step's `rounding`, by what the record alone adds; and what is in
    a slot that is empty changes no bit of the sum, which shows that the shares of others do not depend
    on it. Nothing moves and nothing is charged.

    Args:
        step: as it is; its randomness must have a state to put back.
        batch: slots to work on.
        places: which of the batch's slots are emptied, one at a time; all of them by default.
        lengths: factors of the loss, in clipping norms.
    """
    if isinstance(step.generator, SystemSource) or not len(batch):
        raise Unsupported(
            "this check repeats a sum with the same coins and masks: it needs randomness that can be "
            "put back, and a record to leave out. Pass a step that is not secure, and a batch that is "
            "not empty."
        )
    slots, data = torch.arange(len(batch)), take(batch.data, batch.indices)
    emptied = slots.tolist() if places is None else places

    def total(content: Data, present: Tensor) -> Tensor:
        return sum_before_noise(step, Batch(slots, content, batch.physical, present))

    def as_bounded(length: float) -> bool:
        with _scaled_losses(step, 1.0 if length == 1 else length * step.plan.clipping.reference_norm):
            whole = total(data, slots >= 0)
            return all(_own_share(step, whole, total, data, slots == place) for place in emptied)

    with rehearsal(step):
        bounded = all(map(as_bounded, lengths))
    return Check(name="influence of a record", p_value=float(bounded))


def charged(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether every step is charged once, on the ledger and in its file if it has one.

    Args:
        step: as it is; its model moves.
        data: as many records as the step is for.
        steps: to run.
    """
    check_count("steps", steps, "they are counted", at_least=1)
    before = step.ledger.counts.get(step.plan, 0)
    for batch in step.batches(data, steps=steps):
        step(batch)
    ledgers = [step.ledger]
    if step.ledger.path is not None:
        ledgers.append(Ledger(step.ledger.path, read_only=True))
    right = all(ledger.counts.get(step.plan, 0) == before + steps for ledger in ledgers)
    return Check(name="charges", p_value=float(right))


def nothing_kept(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether a step leaves nothing but weights and optimizer state.

    Every other tensor of the model (buffers, frozen parameters, gradients, attributes) is the same after
    it, bit for bit.

    Args:
        step: as it is; its model moves.
        data: as many records as the step is for.
        steps: to run.
    """
    check_count("steps", steps, "they are counted", at_least=1)
    unchanged = True
    for batch in step.batches(data, steps=steps):
        before = {name: value.clone() for name, value in _beside_weights(step).items()}
        step(batch)
        after = _beside_weights(step)
        unchanged &= before.keys() == after.keys()
        unchanged &= all(
            _equal_bits(value, after[name]) for name, value in before.items() if name in after
        )
    return Check(name="what a step keeps", p_value=float(unchanged))


def _own_share(
    step: PrivateStep,
    whole: Tensor,
    total: Callable[[Data, Tensor], Tensor],
    data: Data,
    only: Tensor,
) -> bool:
    """Whether one slot adds its own clipped gradient to a sum, and no other share depends on it."""
    without, alone = total(data, ~only), total(data, only)
    place = int(only.nonzero())
    exchanged = tree_map(data, _filled(place, (place + 1) % len(only)))
    moved = whole - without
    if not torch.equal(without, total(exchanged, ~only)) or not bool(moved.isfinite().all()):
        return False
    blocks = step.plan.clipping.sensitivity(step.size)
    sizes = [block.dimension or len(whole) for block in blocks]
    more = 1 + step.rounding
    return all(
        float(torch.linalg.vector_norm(part, block.p)) <= block.norm * more
        and float(part.abs().max()) <= block.max_entry * more
        and float((part - own).abs().max()) <= block.norm * step.rounding
        for part, own, block in zip(moved.split(sizes), alone.split(sizes), blocks, strict=True)
    )


def _filled(place: int, source: int) -> Callable[[Tensor], Tensor]:
    """Function that puts a copy of another slot's row in a slot."""

    def exchanged(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[place] = rows[source]
        return rows

    return exchanged


@contextmanager
def _scaled_losses(step: PrivateStep, factor: float) -> Iterator[None]:
    """Multiply every record's loss, and so its gradient."""
    loss = step.loss
    step.loss = lambda outputs, targets: factor * loss(outputs, targets)
    try:
        yield
    finally:
        step.loss = loss


def _beside_weights(step: PrivateStep) -> dict[str, Tensor]:
    """Every tensor of the model that is not a trained weight, by a name of its own."""
    trained = {id(value) for value in step.trainable().values()}
    tensors: dict[str, Tensor] = {}
    for path, module in step.model.named_modules():
        parameters = {name: value for name, value in module._parameters.items() if value is not None}
        for name, value in parameters.items():
            if id(value) not in trained:
                tensors[f"{path}.{name}"] = value.detach()
            if value.grad is not None:
                tensors[f"{path}.{name}.grad"] = value.grad
        for key, own in vars(module).items():
            if key not in ("_parameters", "_modules"):
                for number, value in enumerate(tree_leaves(own)):
                    if id(value) not in trained:  # a recurrent layer lists its weights a second time
                        tensors[f"{path}.{key} {number}"] = value.detach()
    return tensors


def _equal_bits(before: Tensor, after: Tensor) -> bool:
    if before.dtype != after.dtype:
        return False
    if before.is_floating_point():
        before, after = before.nan_to_num(), after.nan_to_num()
    return torch.equal(before, after)
