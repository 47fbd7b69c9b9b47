"""Draws of numpy and of Python's `random` in a forward pass, which are not the step's.

Under `torch.vmap` forward() runs once for all records of a physical batch: a number that numpy draws is
one number for all of them, and their gradients move together. Under sampling, which records are in one
physical batch depends on who was drawn, so that the law of the others' sum would tell, and amplification
is not proved (docs/guarantees/tape.md, 1). torch's draws are each record's own.
"""

import random

import numpy as np
from torch import nn

from hush.core.errors import Unsupported

HostState = tuple[object, ...]


def host_random_state() -> HostState:
    """The states of Python's and numpy's shared generators, to compare."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, np.asarray(words).tobytes(), *rest


def check_host_draws(before: HostState) -> None:
    """Raise if numpy's or Python's shared generator was drawn from since `before`."""
    if host_random_state() != before:
        raise Unsupported(
            "the model draws with numpy or Python's random in forward(): such a number is shared by all "
            "records that are computed together, so that the others' gradients would tell who was drawn "
            "with them. Draw with torch, whose numbers are each record's own, or turn it off "
            "(SpecAugment of wav2vec2 and Whisper: config.apply_spec_augment = False)."
        )


def check_own_generators(model: nn.Module) -> None:
    """Raise if a module keeps a generator of numpy's or Python's, whose draws nobody would see."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, kinds):
                raise Unsupported(
                    f"{name + '.' if name else ''}{attribute} is a generator of its own "
                    f"({type(value).__name__}): what it draws in forward() is shared by all records "
                    "that are computed together, so that the others' gradients would tell who was drawn "
                    "with them. Draw with torch instead, which gives every record its own numbers."
                )
