"""Self-test of a private step just before it runs: it passes, or the run does not begin."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from hush.audit.checks.draws import draws_independent
from hush.audit.checks.noise import (
    Check,
    noise_at_any_size,
    noise_fresh,
    noise_law,
    noise_scale,
    observable,
    observe_proposals,
)
from hush.audit.checks.selective import fresh_test_batches, noisy_verdicts
from hush.audit.checks.step import charged, influence, length_hidden, nothing_kept
from hush.audit.checks.units import batch_of_units, largest_units, number_of_units
from hush.core.errors import Unsupported
from hush.core.guarantee import Neighbours
from hush.core.randomness import SystemSource, source_for
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Batch, Data
from hush.training.distributed.streams import shared_source
from hush.training.step import PrivateStep

_NUMBERS = 1000
"""Numbers of noise to look at; a scale off by a fifth shows in so many."""
_MOST_NUMBERS = 2**18
_COINS = 2_000_000
_VERDICTS = 200


def self_test(step: PrivateStep, data: Data) -> None:
    """Raise unless the step does what is charged, as far as some seconds of running it show.

    Looked at: the scale, law and freshness of the noise, also of an empty draw; the draws; that emptying
    the slots of a unit (a record, or an owner of several) moves the sum by its clipped gradient and no
    other unit's share by a bit; that steps are charged and keep nothing; for selective plans the test's
    draws and noise; under `ADD_REMOVE` that an update does not follow the length of the data. Of noise
    that is not added to a sum (`Rectified` and others), and in public bases, the noise is left out.

    **Guarantee.** It releases nothing: the model, the optimizer, the randomness and the ledger are as
    they were, and it passes or raises one fixed message. A step that does what is charged fails with a
    chance below 2e-5, whatever the records are.

        hush.train(..., self_test=hush.audit.self_test)

    Args:
        step: before its next draw; it may have been resumed.
        data: the records it is about to be run on.
    """
    with rehearsal(step):
        passed = [check.passed for check in _checks(step, data)]  # all of them, whatever fails first
    if not all(passed):
        raise Unsupported(
            "the self-test found that this step does not do what is charged: its noise, its draws, its "
            "charges, what it keeps or how far one unit moves a sum is not as the plan says. Which of "
            "them is not said, as it may depend on the records. Nothing was charged and the model has "
            "not moved. Run the checks of docs/guarantees/audit.md on data that need no protection."
        )


def _checks(step: PrivateStep, data: Data) -> Iterator[Check]:
    physical = step.probe(data)
    empty = Batch(torch.arange(0), data, physical)
    units = number_of_units(step, data)
    per_unit = 1 if step.units is None else step.units.per_unit
    draws = min(400, max(32, _COINS // units))
    # as many as a step is likely to work on at once: kernels are chosen by shape
    drawn = math.ceil(step.plan.sampling.participation * units)
    some = min(units, max(1, physical // per_unit), max(2, drawn))
    yield draws_independent(step, data, draws)
    if step.trials is not None:
        yield fresh_test_batches(step, data, draws)
        yield noisy_verdicts(step, _VERDICTS)
    yield charged(step, data, 2)
    yield nothing_kept(step, data, 1)
    if isinstance(step.generator, SystemSource):
        # a sum is repeated with the same dropout, coins and masks, or they would pass for noise
        step.generator = source_for(step.device)
        if step.processes is not None:
            step.generator = shared_source(step.generator, step.processes)
    if observable(step):
        rows = min(16, max(2, -(-_NUMBERS // step.size)))
        observed = observe_proposals(step, [step.draw(empty) for _ in range(rows)])
        yield noise_scale(observed)
        yield noise_at_any_size(step, data, max(2, rows // 4), sorted({0, 1, some}))
        fewer = replace(observed, noise=observed.noise[:, :_MOST_NUMBERS])
        yield noise_law(fewer)
        yield noise_fresh(fewer)
    batch = batch_of_units(step, largest_units(step, some), data, physical)
    yield influence(step, batch, places=sorted({0, some // 2, some - 1}), lengths=(1.0,))
    yield influence(step, batch, places=(some - 1,), lengths=(1e4, 1e8))
    if per_unit > 1:
        # in physical batches that have no room for a unit: none may be cut
        few = batch_of_units(step, largest_units(step, min(2, units)), data, per_unit // 2)
        yield influence(step, few, places=(len(few) - 1,), lengths=(1e4,))
    if step.adjacency.neighbours is Neighbours.ADD_REMOVE and units > 1:
        yield length_hidden(step, data)
