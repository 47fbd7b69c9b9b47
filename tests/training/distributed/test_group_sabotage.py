"""Two processes that run a step in five wrong ways: a check that passes on the step as it is fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.randomness import Stream
from hush.training.data import Batch
from hush.training.distributed.process_group import ProcessGroup
from hush.training.noisy_mean import NoisyMean
from hush.training.reducer import Local, StepStreams
from hush.training.step import PrivateStep
from hush_recipes.audit.draws import Check, draws_independent
from hush_recipes.audit.noise import noise_fresh, noise_scale, observe
from hush_recipes.audit.self_test import charged
from tests.training.distributed import spawned
from tests.training.distributed.problems import data_of, step_of

Sabotage = Callable[[], Any]
"""A context in which the step is broken."""


@contextmanager
def noise_per_rank() -> Iterator[None]:
    """Every rank adds the whole noise to the sum of its share, and the noisy sums are added up."""

    def noisy(self: ProcessGroup, compute: Callable[[], Tensor], mean: NoisyMean) -> Tensor:
        return self.whole_sum(mean(compute().clone()))

    with mock.patch.object(ProcessGroup, "noisy_mean", noisy):
        yield


@contextmanager
def sampling_per_rank() -> Iterator[None]:
    """Every rank draws from all records at the whole rate, and works on all that it drew."""
    draw = PrivateStep.draw
    own: dict[int, Stream] = {}

    def of_rank(self: PrivateStep, like: Batch, sampling: Any = None) -> Batch:
        shared, rank = self.generator, self.reducer.rank
        self.generator = own.setdefault(rank, Stream(self.device, bytes([rank + 1] * 32)))
        try:
            return draw(self, like, sampling)
        finally:
            self.generator = shared

    with (
        mock.patch.object(PrivateStep, "draw", of_rank),
        mock.patch.object(ProcessGroup, "share", lambda _, batch: batch),
    ):
        yield


@contextmanager
def divisor_per_rank() -> Iterator[None]:
    """Every rank divides by the number of records that it expects in its share."""
    own = ProcessGroup._own

    def halved(self: ProcessGroup, mean: NoisyMean) -> NoisyMean:
        return replace(own(self, mean), expected=mean.expected / 2)

    with mock.patch.object(ProcessGroup, "_own", halved):
        yield


@contextmanager
def ledger_per_rank() -> Iterator[None]:
    """Every rank opens a ledger of its own, and charges the steps to it."""

    def opened(self: ProcessGroup, ledger: Any, plan: Any, adjacency: Any) -> Ledger:
        return Local.open_ledger(self, ledger, plan, adjacency)

    def charge(self: ProcessGroup, ledger: Ledger, plan: Any, **details: Any) -> None:
        ledger.charge(plan, **details)

    with (
        mock.patch.object(ProcessGroup, "open_ledger", opened),
        mock.patch.object(ProcessGroup, "charge", charge),
    ):
        yield


@contextmanager
def shared_noise_stream() -> Iterator[None]:
    """Every rank draws its slice of the noise from one stream, from its beginning."""
    streams = ProcessGroup.streams

    def of_all(self: ProcessGroup, source: Stream) -> StepStreams:
        with mock.patch.object(self, "rank", 0):
            return streams(self, source)

    with mock.patch.object(ProcessGroup, "streams", of_all):
        yield


def scale() -> Check:
    return noise_scale(observe(step_of(seed=1), data_of(), 12))


def fresh() -> Check:
    return noise_fresh(observe(step_of(seed=1), data_of(), 12))


def draws() -> Check:
    return draws_independent(step_of(seed=1), data_of(), 60)


def charges() -> Check:
    return charged(step_of(), data_of(), 3)


CAUGHT: list[tuple[Sabotage, Callable[[], Check]]] = [
    (noise_per_rank, scale),
    (sampling_per_rank, draws),
    (divisor_per_rank, scale),
    (ledger_per_rank, charges),
    (shared_noise_stream, fresh),
]


def as_it_is(folder: Path) -> dict[str, bool]:
    return {check.__name__: check().passed for check in (scale, fresh, draws, charges)}


def sabotaged(folder: Path) -> dict[str, bool]:
    found = {}
    for broken, check in CAUGHT:
        with broken():
            found[broken.__name__] = check().passed
    return found


def other_draws(folder: Path) -> None:
    with sampling_per_rank():
        step = step_of(ledger=folder / "ledger.jsonl")
        for batch in step.batches(data_of(), steps=1):
            step(batch)


result = partial(spawned.result, __name__, 2)


def test_the_checks_pass_on_the_step_as_it_is() -> None:
    assert result("as_it_is") == [dict.fromkeys(("scale", "fresh", "draws", "charges"), True)] * 2


@pytest.mark.parametrize("broken", [broken.__name__ for broken, _ in CAUGHT])
def test_it_is_caught(broken: str) -> None:
    assert [each[broken] for each in result("sabotaged")] == [False, False]


def test_a_step_of_ranks_that_drew_for_themselves_is_not_charged() -> None:
    for raised in result("other_draws"):
        assert raised.kind == "ProcessFailed"
        assert "differ in the slots drawn" in raised.text
