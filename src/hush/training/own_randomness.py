"""Dropout, views and their like, drawn from a seed of our own and not from torch's global state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch's global generators draw from this seed, and leave them as they were."""
    shared = [torch.default_generator]
    if device.type == "cuda":
        shared.append(torch.cuda.default_generators[device.index or 0])
    states = [each.get_state() for each in shared]
    try:
        for each in shared:
            each.manual_seed(seed)
        yield
    finally:
        for each, state in zip(shared, states, strict=True):
            each.set_state(state)
