"""Broken ways to run a step by several processes, each a few lines: what every check must find out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.randomness import RandomSource, Stream
from hush.training.data import Batch
from hush.training.distributed.process_group import ProcessGroup
from hush.training.noisy_mean import NoisyMean
from hush.training.reducer import Local, StepStreams
from hush.training.step import PrivateStep

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
        return replace(own(self, mean), records=mean.records // 2)

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

    def of_all(self: ProcessGroup, source: RandomSource) -> StepStreams:
        with mock.patch.object(self, "rank", 0):
            return streams(self, source)

    with mock.patch.object(ProcessGroup, "streams", of_all):
        yield
