"""Private gradient of a step, one flat vector: its layout, its noise and its fingerprint."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.core.parts import SensitivitySet
from hush.core.plan import Plan
from hush.core.randomness import RandomSource
from hush.gradients.public_basis import PublicBasis
from hush.gradients.terms import ROUNDING

T = TypeVar("T")
BlockNoise = list[Callable[[Tensor], Tensor]]
"""Functions that privatize the blocks of a clipped sum, one each."""

_BACKGROUND_SIZE = 2**17
"""Trained parameters from which on drawing noise takes longer than starting a thread."""
_BLOCK = 4096
_BLOCKS_AT_ONCE = 2**14
"""Blocks hashed at once on a GPU."""
_KEPT_WEIGHTS = 2**22
"""Words up to which a GPU keeps their weights: fewer launches than block by block."""
_DOUBLE_ROUNDING = 2.0**-12
"""Share of its bound by which rounding in double precision lets a record move a sum more than that."""
# An odd 64-bit constant (the golden ratio), written as a signed integer.
_STRIDE = -7046029254386353131


@dataclass(frozen=True, eq=False)
class Layout:
    """Flat gradient of one step: trainable parameters one after another, in blocks of the clipping.

    Worked out once a step, as walking the modules of a deep model takes longer than adding its noise.
    """

    parameters: dict[str, nn.Parameter]
    sensitivity: Sequence[SensitivitySet]
    """One a block of the clipping."""
    block_sizes: list[int]
    """Coordinates in each block of the clipping."""
    rounding: float
    """Share of its bound by which rounding may let one record move a clipped sum more than that."""


def rounding_of(parameters: Iterable[Tensor]) -> float:
    """Share of its bound by which rounding may let one record move a clipped sum more than that."""
    double = all(value.dtype == torch.float64 for value in parameters)
    return _DOUBLE_ROUNDING if double else ROUNDING


def split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector in the shapes of the parameters."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def set_gradients(parameters: Sequence[nn.Parameter], update: Tensor) -> None:
    """Give the parameters a flat vector for their gradients, each in its own precision.

    In memory that is not the vector's: the optimizer may overwrite it.
    """
    for precision in {parameter.dtype for parameter in parameters}:
        copy = update.to(precision, copy=True)
        gradients = torch._utils._unflatten_dense_tensors(copy, parameters)  # one call for all
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.dtype == precision:
                parameter.grad = gradient


def noisy_mean(
    total: Tensor,
    plan: Plan,
    layout: Layout,
    basis: PublicBasis | None,
    records: int,
    generator: RandomSource,
    drawn: BlockNoise | None = None,
) -> Tensor:
    """Noisy mean from a clipped sum, in place: privatized by block, over the expected batch size.

    Noise that was not `drawn` before comes from the generator.
    """
    # scaled down, so that what rounding adds to a record's share is within the noise; and up again,
    # unless that would leave the noise's support
    share = 1 - layout.rounding
    blocks = total.mul_(share).split(layout.block_sizes)
    if drawn is not None:
        for block, privatize in zip(blocks, drawn, strict=True):
            block.copy_(privatize(block))
    else:
        noises = plan.noise.per_block(layout.sensitivity, plan.clipping.reference_norm)
        for block, (noise, norm) in zip(blocks, noises, strict=True):
            if not len(block):  # of a slice that another rank holds
                continue
            block.copy_(noise.privatize(block, norm=norm, generator=generator))
    total = total if basis is None else basis.to_parameters(total)
    undone = share if plan.noise.additive else 1.0
    return total.div_(undone * plan.sampling.expected(records))


@contextmanager
def early_noise(
    plan: Plan, layout: Layout, generator: RandomSource, device: torch.device
) -> Iterator[Callable[[], BlockNoise | None]]:
    """Draw the noise of a step while the block computes its gradients, where that pays.

    Gives the block a function that returns the noise, or None where it is to be drawn once the sum is
    known: drawing is fast, or gradients draw from the same generator.
    """
    small = device.type != "cpu" or sum(layout.block_sizes) < _BACKGROUND_SIZE
    if small or plan.sampling.coordinate_participation < 1:
        yield lambda: None
        return
    with run_in_background(partial(draw_noise, plan, layout, generator, device)) as drawn:
        yield drawn


def draw_noise(plan: Plan, layout: Layout, generator: RandomSource, device: torch.device) -> BlockNoise:
    """Noise of each block of the clipping, drawn before the sum is known."""
    noises = plan.noise.per_block(layout.sensitivity, plan.clipping.reference_norm)
    return [
        noise.prepare(size, norm=norm, generator=generator, device=device) if size else _nothing
        for size, (noise, norm) in zip(layout.block_sizes, noises, strict=True)
    ]


def _nothing(block: Tensor) -> Tensor:
    """A block without coordinates, of a slice that another rank holds."""
    return block


@contextmanager
def run_in_background(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Give the block a function that returns the result of the work.

    The work is begun before the block, in another thread if there is a core to spare. However the block
    ends, the work is over then.
    """
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


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A 64-bit hash of the tensors' bits: equal releases have equal names.

    Integer arithmetic wraps and is the same in any order, so the name does not depend on how a
    device adds. It guards against accidents, not against forgery.
    """
    total = 0
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    hashes = [_hash(tensor) for tensor in flat]
    for tensor, part in zip(flat, torch.stack(hashes).tolist() if hashes else (), strict=True):
        total = (total * _STRIDE + part + tensor.numel() + 1) % 2**64
    return f"{total:016x}"


def _hash(flat: Tensor) -> Tensor:
    """The bits as 64-bit words, each times a number of its own place, summed."""
    short = -flat.numel() % (8 // flat.element_size())
    words = (functional.pad(flat, (0, short)) if short else flat).view(torch.int64)
    if words.is_cuda and len(words) <= _KEPT_WEIGHTS:
        return (words * _place_weights(words.device, len(words))).sum()
    blocks, rest = divmod(len(words), _BLOCK)
    whole = words[: blocks * _BLOCK].view(blocks, _BLOCK)
    weights = _weights(words.device)
    tail = words[blocks * _BLOCK :] * weights[:rest]
    sums = torch.cat([_block_hashes(whole, weights), tail.sum(0, True)])
    return (sums * _weights(words.device, blocks + 1)).sum()


def _block_hashes(words: Tensor, weights: Tensor) -> Tensor:
    """The words of each block times their weights, summed."""
    if words.is_cuda:
        return torch.cat([(some * weights).sum(1) for some in words.split(_BLOCKS_AT_ONCE)])
    # products are added as they are made, and not written first
    return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), weights.numpy()))


@lru_cache(maxsize=2)
def _place_weights(device: torch.device, count: int) -> Tensor:
    """Weight of each of so many words: of its place in a block, times that of the block."""
    place = torch.arange(count, device=device)
    blocks = _weights(device, count // _BLOCK + 1)
    return _weights(device)[place % _BLOCK] * blocks[place // _BLOCK]


@lru_cache
def _weights(device: torch.device, count: int = _BLOCK) -> Tensor:
    return _mixed(torch.arange(1, count + 1, device=device))


def _mixed(index: Tensor) -> Tensor:
    """Odd numbers that look random, one for each index."""
    mixed = index * _STRIDE
    return (mixed ^ (mixed >> 29)) * _STRIDE | 1
