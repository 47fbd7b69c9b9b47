"""Broken ways to run a step by several processes, each a few lines: what every check must find out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.randomness import Stream
from hush.training import step as step_module
from hush.training.data import Batch
from hush.training.distributed import noise_slices
from hush.training.distributed.group import Processes
from hush.training.distributed.noise_slices import NoiseSlices, whole_sum
from hush.training.phases import clipped_sum, state
from hush.training.phases.private_gradient import noisy_mean
from hush.training.run_folder import open_ledger
from hush.training.step import PrivateStep

Sabotage = Callable[[], Any]
"""A context in which the step is broken."""


@contextmanager
def noise_per_rank() -> Iterator[None]:
    """Every rank adds the whole noise to the sum of its share, and the noisy sums are added up."""

    def mean(self: NoiseSlices, local_sum: Callable[[], Tensor], device: torch.device) -> Tensor:
        own = local_sum().clone()
        noisy_mean(own, self.plan, self.layout, self.basis, self.records, self.source)
        return whole_sum(own, self.processes)

    with mock.patch.object(NoiseSlices, "mean_of_shares", mean):
        yield


@contextmanager
def sampling_per_rank() -> Iterator[None]:
    """Every rank draws from all records at the whole rate, and works on all that it drew."""
    draw = PrivateStep.draw
    own: dict[int, Stream] = {}

    def of_rank(self: PrivateStep, like: Batch, sampling: Any = None) -> Batch:
        assert self.processes is not None
        shared, rank = self.generator, self.processes.rank
        self.generator = own.setdefault(rank, Stream(self.device, bytes([rank + 1] * 32)))
        try:
            return draw(self, like, sampling)
        finally:
            self.generator = shared

    with (
        mock.patch.object(PrivateStep, "draw", of_rank),
        mock.patch.object(clipped_sum, "share_of", lambda batch, *_, **__: batch),
    ):
        yield


@contextmanager
def divisor_per_rank() -> Iterator[None]:
    """Every rank divides by the number of records that it expects in its share."""

    def mean(total: Tensor, plan: Any, layout: Any, basis: Any, records: int, *rest: Any) -> Tensor:
        return noisy_mean(total, plan, layout, basis, records // 2, *rest)

    with mock.patch.object(noise_slices, "noisy_mean", mean):
        yield


@contextmanager
def ledger_per_rank() -> Iterator[None]:
    """Every rank opens a ledger of its own, and charges the steps to it."""

    def opened(ledger: Any, plan: Any, adjacency: Any, processes: Processes) -> Ledger:
        return open_ledger(ledger, plan, adjacency)

    def charge(processes: Processes, ledger: Ledger, plan: Any, **details: Any) -> None:
        ledger.charge(plan, **details)

    with (
        mock.patch.object(state, "open_ledger_for", opened),
        mock.patch.object(step_module, "charge_together", charge),
    ):
        yield


@contextmanager
def shared_noise_stream() -> Iterator[None]:
    """Every rank draws its slice of the noise from one stream, from its beginning."""
    begin = PrivateStep._begin_streams

    def of_all(self: PrivateStep) -> None:
        processes = self.processes
        assert processes is not None
        with mock.patch.object(processes, "rank", 0):
            begin(self)

    with mock.patch.object(PrivateStep, "_begin_streams", of_all):
        yield
