"""Dropout, views and coins, drawn from the step's source and not from torch's global state."""

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
    states = [each.get_state() for each in shared]
    try:
        for each in shared:
            fill_state(each, source)
        yield
    finally:
        for each, state in zip(shared, states, strict=True):
            each.set_state(state)
