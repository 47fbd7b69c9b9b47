"""All checks of a private step, and its checks of sensitivity, charges and state."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from hush.accounting.ledger import Ledger
from hush.core.errors import PrivacyWarning, Unsupported
from hush.core.guarantee import Neighbours
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.data import Batch, Data, count, pair_of, take
from hush.training.methods.selective import Trials
from hush.training.rehearsal import rehearsal
from hush.training.step import PrivateStep
from hush_recipes.audit.draws import (
    Check,
    batch_of_units,
    draws_independent,
    fresh_test_batches,
    noisy_verdicts,
    number_of_units,
)
from hush_recipes.audit.noise import (
    noise_at_any_size,
    noise_fresh,
    noise_law,
    noise_scale,
    observable,
    observe_proposals,
    sum_before_noise,
)

_NUMBERS = 1000  # number of noise values: detects a scale error of a fifth
_MOST_NUMBERS, _COINS, _VERDICTS = 2**18, 2_000_000, 200
_LENGTHS = (1.0, 1e4, 1e8)
"""Factors of the losses, in clipping norms, to test outliers."""


def self_test(step: PrivateStep, data: Data) -> None:
    """Run all checks on a step for a few seconds; raise an error that names the failed ones.

    Checks the scale, distribution and independence of the noise, the sampling, the influence of a record
    on the clipped sum, the charges, and the state; for selective plans also the sampling and noise of
    the test; under `ADD_REMOVE` that updates do not depend on the length of the data. The noise is not
    checked with public bases or bounded support.

    Model, optimizer, randomness and ledger are restored. A correct step fails with probability below
    2e-5, for any records.

    Args:
        step: Private step without a pending batch; it may be resumed.
        data: Records that need no protection, with which the step was made.
    """
    with rehearsal(step):
        failed = [check.name for check in _checks(step, data) if not check.passed]
    if failed:
        raise Unsupported(
            f"The step violates its guarantee: the checks of {', '.join(failed)} failed. "
            "docs/guarantees/audit.md describes them."
        )


def _checks(step: PrivateStep, data: Data) -> Iterator[Check]:
    physical = step.probe(data)
    empty = Batch(torch.arange(0), data, physical)
    units = number_of_units(step, data)
    per_unit = 1 if step.units is None else step.units.per_unit
    draws = min(400, max(32, _COINS // units))
    # the usual batch size, because kernels depend on shapes
    drawn = math.ceil(step.plan.sampling.average_participation * units)
    some = min(units, max(1, physical // per_unit), max(2, drawn))
    yield draws_independent(step, data, draws)
    if isinstance(step.rule, Trials):
        yield fresh_test_batches(step, data, draws)
        yield noisy_verdicts(step, _VERDICTS)
    yield charged(step, data, 2)
    yield nothing_kept(step, data, 1)
    if observable(step):
        rows = min(16, max(2, -(-_NUMBERS // step.size)))
        observed = observe_proposals(step, [step.draw(empty) for _ in range(rows)])
        yield noise_scale(observed)
        yield noise_at_any_size(step, data, max(2, rows // 4), sorted({0, 1, some}))
        fewer = replace(observed, noise=observed.noise[:, :_MOST_NUMBERS])
        yield noise_law(fewer)
        yield noise_fresh(fewer)
    batch = batch_of_units(step, some, data, physical)
    yield influence(step, batch, places=sorted({0, some // 2, some - 1}), lengths=(1.0,))
    yield influence(step, batch, places=(some - 1,), lengths=(1e4, 1e8))
    if per_unit > 1:
        # physical batches smaller than a user, to test that users are not split
        few = batch_of_units(step, min(2, units), data, per_unit // 2)
        yield influence(step, few, places=(len(few) - 1,), lengths=(1e4,))
    if step.adjacency.neighbours is Neighbours.ADD_REMOVE and units > 1:
        yield length_hidden(step, data)


def influence(
    step: PrivateStep,
    batch: Batch,
    *,
    places: Sequence[int] | None = None,
    lengths: Sequence[float] = _LENGTHS,
) -> Check:
    """Check that removing a record (or user) changes the sum by its clipped gradient only.

    With the same coins, masks and dropout, and for gradients of several lengths, the sum must change by
    the record's own contribution, within the sensitivity set and the step's `rounding`. The content of
    empty slots must not change the sum. All slots of a user are emptied together. The step is unchanged.

    Args:
        step: Private step.
        batch: Batch to sum.
        places: Positions in the batch to remove, one at a time; by default all.
        lengths: Factors of the losses, in clipping norms.
    """
    if not len(batch):
        raise Unsupported("This check repeats a sum of records. Pass a batch that is not empty.")
    counts = torch.ones(len(batch), dtype=torch.long) if batch.counts is None else batch.counts.cpu()
    slots, data = torch.arange(len(batch.indices)), take(batch.data, batch.indices)
    unit = torch.arange(len(batch)).repeat_interleave(counts)
    emptied = range(len(batch)) if places is None else places

    def total(content: Data, present: Tensor) -> Tensor:
        return sum_before_noise(step, Batch(slots, content, batch.physical, present, batch.counts))

    bounded, loss = True, step.gradients.loss
    try:
        with rehearsal(step):
            for length in lengths:
                factor = 1.0 if length == 1 else length * step.plan.clipping.reference_norm
                step.gradients.loss = partial(lambda by, *pair: by * loss(*pair), factor)
                shares = (_own_share(step, total, data, unit == place) for place in emptied)
                bounded = bounded and all(shares)
    finally:
        step.gradients.loss = loss
    return Check(name="sensitivity", p_value=float(bounded))


def charged(step: PrivateStep, data: Data, steps: int) -> Check:
    """Check that every step is charged once: on the ledger, in its file and on other ranks."""
    before = step.ledger.counts.get(step.plan, 0)
    for batch in step.batches(data, steps=steps):
        step(batch)
    ledgers = [step.ledger]
    if step.ledger.path is not None:
        ledgers.append(Ledger(step.ledger.path, read_only=True))
    period = step.plan.sampling.period
    periods = -(-step.steps // period) - (step.steps - steps) // period
    right = all(ledger.counts.get(step.plan, 0) == before + periods * period for ledger in ledgers)
    own = step.ledger
    last = own.digest_at(step.run, step.steps)
    said = step.reducer.exchange("the ledgers", [right, own.identity, last, own.mirrored])
    right = all(each[0] and each[1:3] == said[0][1:3] for each in said)
    right &= [each[3] for each in said] == [False] + [True] * (len(said) - 1)
    return Check(name="charges", p_value=float(right))


def length_hidden(step: PrivateStep, data: Data) -> Check:
    """Check that an update does not depend on the private number of records or users (`ADD_REMOVE`).

    Compares updates of an empty batch with the same noise, on the data with and without the last record
    or user, bit for bit.
    """
    units, pair = step.units, pair_of(data)
    rows = count(data) - (1 if units is None else int(units.counts[-1]))
    first: Any = Subset(data, range(rows))  # type: ignore[arg-type]
    if pair is not None:
        first = tree_map(tuple(pair), lambda values: values[:rows])
    update = _update_of_empty_batch(step, data)
    try:
        if units is not None:  # the batch is empty, so the user ids of the other rows do not matter
            step.units = replace(units, order=torch.arange(rows), counts=units.counts[:-1])
        of_fewer = _update_of_empty_batch(step, first)
    finally:
        step.units = units
    return Check(name="length of the data", p_value=float(torch.equal(update, of_fewer)))


def nothing_kept(step: PrivateStep, data: Data, steps: int) -> Check:
    """Check that a step changes trained weights and optimizer state, and no other tensor."""
    unchanged = True
    for batch in step.batches(data, steps=steps):
        before = [value.clone() for value in _other_tensors(step)]
        step(batch)
        after = _other_tensors(step)
        unchanged &= len(before) == len(after) and all(
            a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(before, after, strict=True)
        )
    return Check(name="state", p_value=float(unchanged))


def _own_share(
    step: PrivateStep, total: Callable[[Data, Tensor], Tensor], data: Data, only: Tensor
) -> bool:
    """Whether slots contribute one clipped gradient to a sum, and the rest does not depend on them."""
    places = only.nonzero().squeeze(1)

    def filled(content: Data, sources: Tensor) -> Data:
        """Records with the slots of the user filled from other slots."""

        def fill(rows: Tensor) -> Tensor:
            return rows.index_copy(0, places.to(rows.device), rows[sources.to(rows.device)])

        return tree_map(content, fill)  # type: ignore[no-any-return]

    contents = [data]
    if len(places) > 1:  # copies of one record: separately clipped contributions would add up
        contents.append(filled(data, places[:1].expand(len(places))))
    blocks, more = step.plan.clipping.sensitivity(step.size), 1 + step.rounding
    for content in contents:
        without, alone = total(content, ~only), total(content, only)
        exchanged = filled(content, (places + len(places)) % len(only))
        moved = total(content, only | ~only) - without
        if not torch.equal(without, total(exchanged, ~only)) or not bool(moved.isfinite().all()):
            return False
        sizes = [block.dimension or len(moved) for block in blocks]
        for part, own, block in zip(moved.split(sizes), alone.split(sizes), blocks, strict=True):
            if not (
                float(torch.linalg.vector_norm(part, block.p)) <= block.norm * more
                and float(part.abs().max()) <= block.max_entry * more
                and float((part - own).abs().max()) <= block.norm * step.rounding
            ):
                return False
    return True


def _update_of_empty_batch(step: PrivateStep, data: Data) -> Tensor:
    """Update of an empty batch, with the noise of the next draw."""
    with rehearsal(step), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", PrivacyWarning
        )  # about the public estimate of the number of records
        source = step.generator
        state = source.get_state()
        batch = next(step.batches(data))
        source.set_state(state)  # the number of random words in a draw depends on the length
        nobody = None if batch.counts is None else batch.counts[:0]
        return step.private_gradient(replace(batch, indices=batch.indices[:0], counts=nobody)).clone()


def _other_tensors(step: PrivateStep) -> list[Tensor]:
    """Every tensor of the model that is not a trained weight, in a fixed order."""
    trained = {id(value) for value in step.trainable().values()}
    modules = step.model.modules()
    attributes = [{key: own for key, own in vars(m).items() if key != "_modules"} for m in modules]
    gradients = [value.grad for value in step.model.parameters() if value.grad is not None]
    # recurrent layers have further references to their weights
    return [value.detach() for value in tree_leaves([attributes, gradients]) if id(value) not in trained]
