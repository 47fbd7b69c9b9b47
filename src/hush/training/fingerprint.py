"""A short name for a released update, computed where the tensors are."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 4096
_AT_ONCE = {"cpu": 64, "cuda": 2**14}
"""Blocks worked on at once: on the CPU few enough to stay in the cache."""
# An odd 64-bit constant (the golden ratio), written as a signed integer.
_STRIDE = -7046029254386353131


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A 64-bit hash of the tensors' bits: equal releases have equal names.

    Integer arithmetic wraps and is the same in any order, so the name does not depend on how a
    device adds. It guards against accidents, not against forgery.
    """
    total = 0
    hashes = [_hash(tensor) for tensor in tensors]
    for part in torch.stack(hashes).tolist() if hashes else ():
        total = (total * _STRIDE + part) % 2**64
    return f"{total:016x}"


def _hash(tensor: Tensor) -> Tensor:
    """The bits as 64-bit words, each times a number of its own place, summed."""
    flat = tensor.detach().reshape(-1)
    short = -flat.numel() % (8 // flat.element_size())
    words = (functional.pad(flat, (0, short)) if short else flat).view(torch.int64)
    blocks, rest = divmod(len(words), _BLOCK)
    whole = words[: blocks * _BLOCK].view(blocks, _BLOCK)
    weights = _weights(words.device)
    several = whole.split(_AT_ONCE[words.device.type])
    tail = words[blocks * _BLOCK :] * weights[:rest]
    sums = torch.cat([*((some * weights).sum(1) for some in several), tail.sum(0, True)])
    places = torch.arange(1, blocks + 2, device=words.device)
    return (sums * _mixed(places)).sum() + flat.numel() + 1


@lru_cache
def _weights(device: torch.device) -> Tensor:
    return _mixed(torch.arange(1, _BLOCK + 1, device=device))


def _mixed(index: Tensor) -> Tensor:
    """Odd numbers that look random, one for each index."""
    mixed = index * _STRIDE
    return (mixed ^ (mixed >> 29)) * _STRIDE | 1
