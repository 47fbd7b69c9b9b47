"""Checks of the sensitivity of a clipped sum, of charges, and of state that a step leaves behind."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Subset

from hush.accounting.ledger import Ledger
from hush.audit.checks.noise import Check, sum_before_noise
from hush.audit.checks.units import number_of_units
from hush.core.errors import PrivacyWarning, Unsupported
from hush.core.guarantee import Neighbours
from hush.core.randomness import SystemSource
from hush.core.value import check_count
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Batch, Data, count, pair_of, take
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
    """Whether emptying a unit's slots takes its own clipped gradient from the sum, and that alone.

    With the same coins, masks and dropout, and with gradients of several lengths: the sum moves within
    the plan's sensitivity set and the step's `rounding`, by what the unit alone adds; and what is in
    slots that are empty changes no bit of the sum, which shows that the shares of others do not depend
    on it. Of an owner of several records all slots are emptied at once, with its records in them and
    with copies of one, whose gradients point the same way. Nothing moves and nothing is charged.

    Args:
        step: as it is; its randomness must have a state to put back.
        batch: slots to work on.
        places: which of the batch's units are emptied, one at a time; all of them by default.
        lengths: factors of the loss, in clipping norms.
    """
    if isinstance(step.generator, SystemSource) or not len(batch):
        raise Unsupported(
            "this check repeats a sum with the same coins and masks: it needs randomness that can be "
            "put back, and a record to leave out. Pass a step that is not secure, and a batch that is "
            "not empty."
        )
    if step.shard:
        raise Unsupported(
            "this check repeats the sum of records that no rank holds all of (shard=True). Check the "
            "step without shard, on records that every rank can read."
        )
    counts = torch.ones(len(batch), dtype=torch.long) if batch.counts is None else batch.counts.cpu()
    slots, data = torch.arange(len(batch.indices)), take(batch.data, batch.indices)
    unit = torch.arange(len(batch)).repeat_interleave(counts)
    emptied = range(len(batch)) if places is None else places

    def total(content: Data, present: Tensor) -> Tensor:
        return sum_before_noise(step, Batch(slots, content, batch.physical, present, batch.counts))

    def as_bounded(length: float) -> bool:
        with _scaled_losses(step, 1.0 if length == 1 else length * step.plan.clipping.reference_norm):
            whole = total(data, slots >= 0)
            return all(_own_share(step, whole, total, data, unit == place) for place in emptied) and all(
                _share_of_copies(step, total, data, unit == place)
                for place in emptied
                if counts[place] > 1
            )

    with rehearsal(step):
        bounded = all(map(as_bounded, lengths))
    return Check(name="influence of a unit", p_value=float(bounded))


def charged(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether every step is charged once, on the ledger and in its file if it has one.

    Of several ranks, on the one ledger that rank 0 writes, which the others have a copy of.

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
    if step.processes is not None:
        own = step.ledger
        last = own.digest_at(step.run, step.steps)
        said = step.processes.exchange("the ledgers", [right, own.identity, last, own.mirrored])
        right = all(each[0] and each[1:3] == said[0][1:3] for each in said)
        right &= [each[3] for each in said] == [False] + [True] * (len(said) - 1)
    return Check(name="charges", p_value=float(right))


def length_hidden(step: PrivateStep, data: Data) -> Check:
    """Whether an update is the same on data of one unit less, where their number is private.

    Under the same noise and with nobody drawn, bit for bit: a divisor that follows the length shows.
    Nothing moves and nothing is charged.

    Args:
        step: one that charges for `ADD_REMOVE`; its randomness must have a state to put back.
        data: of two units at least.
    """
    source, units = step.generator, step.units
    private = step.adjacency.neighbours is Neighbours.ADD_REMOVE
    if not private or isinstance(source, SystemSource) or number_of_units(step, data) < 2:
        raise Unsupported(
            "this check repeats the noise of a step on data of one unit less: it needs randomness that "
            "can be put back, two units, and a length that is private. Pass a step with "
            "neighbours=ADD_REMOVE that is not secure."
        )
    rows = count(data) - (1 if units is None else int(units.counts[-1]))
    # nobody is drawn, so that who owns which of the rows that are left does not matter
    fewer = None if units is None else replace(units, order=torch.arange(rows), counts=units.counts[:-1])
    update = _update_of_nobody(step, data)
    try:
        step.units = fewer
        of_fewer = _update_of_nobody(step, _first_rows(data, rows))
    finally:
        step.units = units
    return Check(name="length of the data", p_value=float(torch.equal(update, of_fewer)))


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
    """Whether some slots add one clipped gradient to a sum, and no other share depends on them."""
    without, alone = total(data, ~only), total(data, only)
    places = only.nonzero().squeeze(1)
    exchanged = tree_map(data, _filled(places, (places + len(places)) % len(only)))
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


def _share_of_copies(
    step: PrivateStep, total: Callable[[Data, Tensor], Tensor], data: Data, only: Tensor
) -> bool:
    """`_own_share` of an owner all of whose records are one: what is clipped apart adds up."""
    places = only.nonzero().squeeze(1)
    copies = tree_map(data, _filled(places, places[:1].expand(len(places))))
    return _own_share(step, total(copies, only | ~only), total, copies, only)


def _filled(places: Tensor, sources: Tensor) -> Callable[[Tensor], Tensor]:
    """Function that puts copies of other slots' rows in some slots."""

    def exchanged(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[places.to(rows.device)] = rows[sources.to(rows.device)]
        return rows

    return exchanged


def _update_of_nobody(step: PrivateStep, data: Data) -> Tensor:
    """Update of a batch of these data in which nobody was drawn, under the noise of the next draw."""
    with rehearsal(step), warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # of a constant that is far off
        source = step.generator
        assert not isinstance(source, SystemSource)
        state = source.get_state()
        batch = next(step.batches(data))
        source.set_state(state)  # how much a draw takes of the stream follows the length
        nobody = None if batch.counts is None else batch.counts[:0]
        return step.private_gradient(replace(batch, indices=batch.indices[:0], counts=nobody)).clone()


def _first_rows(data: Data, rows: int) -> Data:
    """The data of the first slots alone."""
    pair = pair_of(data)
    if pair is None:
        return Subset(data, range(rows))  # type: ignore[arg-type]
    inputs, targets = tree_map(tuple(pair), lambda values: values[:rows])
    return inputs, targets


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
