"""Randomness of dropout, views and coins, from the step's source in place of torch's global state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hush.core.randomness import Randomness, fill_state


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
