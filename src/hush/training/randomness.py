"""Randomness of dropout, views, coins and augmentation: from the step's source, not global state."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hush.core.randomness import Randomness, fill_state, random_words

_TWISTER_WORDS = 624
"""32-bit words in the state of a Mersenne twister."""


@contextmanager
def own_randomness(source: Randomness, device: torch.device) -> Iterator[None]:
    """Let torch's global generators draw from states of the source, and leave them as they were."""
    shared = [torch.default_generator]
    if device.type == "cuda":
        shared.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in shared]
    try:
        for generator in shared:
            fill_state(generator, source)
        yield
    finally:
        for generator, state in zip(shared, states, strict=True):
            generator.set_state(state)


@contextmanager
def global_randomness(source: Randomness) -> Iterator[Callable[[], None]]:
    """Let the global generators of torch (CPU), numpy and Python draw from the source for a while.

    Args:
        source: what their states are drawn from.

    Returns:
        A function that draws all three states anew; the old ones come back at the end.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002

    def refresh() -> None:
        fill_state(torch.default_generator, source)
        words = random_words(_TWISTER_WORDS, source).view(np.uint32).reshape(2, _TWISTER_WORDS)
        np.random.set_state(("MT19937", words[0], _TWISTER_WORDS, 0, 0.0))  # noqa: NPY002
        random.setstate((3, (*words[1].tolist(), _TWISTER_WORDS), None))

    try:
        yield refresh
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
