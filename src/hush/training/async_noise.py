"""Noise phase of a private step: noise on a clipped sum, drawn in the background where it pays."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hush.core.plan import Plan
from hush.core.randomness import Randomness
from hush.gradients.public_basis import PublicBasis
from hush.training.parameters import Layout

T = TypeVar("T")
BlockNoise = list[Callable[[Tensor], Tensor]]
"""Functions that privatize the blocks of a clipped sum, one each."""

_BACKGROUND_SIZE = 2**17
"""Trained parameters from which on drawing noise takes longer than starting a thread."""


def background_pays(plan: Plan, dimension: int, device: torch.device) -> bool:
    """Whether noise is drawn while gradients are computed: never where both draw from one generator."""
    return (
        device.type == "cpu"
        and dimension >= _BACKGROUND_SIZE
        and plan.sampling.coordinate_participation == 1
    )


def draw_noise(
    plan: Plan, layout: Layout, generator: Randomness, device: torch.device, *, early: bool
) -> BlockNoise:
    """Noise of each block of the clipping; with `early` it is drawn now, before the sum is known."""
    noises = plan.noise.per_block(layout.sensitivity, plan.clipping.reference_norm)
    if not early:
        return [partial(noise.privatize, norm=norm, generator=generator) for noise, norm in noises]
    return [
        noise.prepare(size, norm=norm, generator=generator, device=device)
        for size, (noise, norm) in zip(layout.block_sizes, noises, strict=True)
    ]


def add_noise(
    total: Tensor,
    noise: BlockNoise,
    plan: Plan,
    layout: Layout,
    basis: PublicBasis | None,
    records: int,
) -> Tensor:
    """Noisy mean from a clipped sum, in place: privatized by block, over the expected batch size."""
    # scaled down, so that what rounding adds to a record's share is within the noise; and up again,
    # unless that would leave the noise's support
    share = 1 - layout.rounding
    for block, privatize in zip(total.mul_(share).split(layout.block_sizes), noise, strict=True):
        block.copy_(privatize(block))
    total = total if basis is None else basis.to_parameters(total)
    undone = share if plan.noise.additive else 1.0
    return total.div_(undone * plan.sampling.expected(records))


@contextmanager
def run_in_background(work: Callable[[], T], enabled: bool) -> Iterator[Callable[[], T]]:
    """Give the block a function that returns the result of the work.

    Where enabled, the work is begun before the block, in another thread if there is a core to spare;
    else when its result is asked for. However the block ends, the work is over then.
    """
    if not enabled:
        yield work
        return
    if not spare_core():
        result = work()
        yield lambda: result
        return
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            yield future.result
        finally:
            _finish(future)


def _finish(work: "Future[Any]") -> None:
    """Wait for it even if the user is impatient: no two may draw from its generator."""
    interrupt = None
    while not work.done():
        try:
            wait([work])
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def spare_core() -> bool:
    """Whether this process may use more cores than torch does: its threads wait for each other."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    return cores > torch.get_num_threads()
