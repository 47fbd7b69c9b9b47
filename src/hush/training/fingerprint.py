"""Fingerprints of tensors, which identify releases and compare ranks."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 4096
_BLOCKS_AT_ONCE = 2**14
"""Number of blocks hashed at once on a GPU."""
_STRIDE = -7046029254386353131
"""An odd 64-bit constant (the golden ratio), as a signed integer."""


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """64-bit hash of the tensors' bits.

    Integer arithmetic modulo 2^64 does not depend on the order of additions, so all devices agree. The
    hash detects accidental differences, not forgery.
    """
    tensors = list(tensors)
    hashes: list[Any] = list(map(_hash, tensors))
    if hashes and isinstance(hashes[0], Tensor):
        hashes = torch.stack(hashes).tolist()  # waits once for a GPU
    total = 0
    for tensor, part in zip(tensors, hashes, strict=True):
        total = (total * _STRIDE + int(part) + tensor.numel() + 1) % 2**64
    return f"{total:016x}"


def _hash(tensor: Tensor) -> Any:
    """Weighted sum of the 64-bit words, with weights by position in a block and by block."""
    flat = tensor.detach().reshape(-1)
    short = -flat.numel() % (8 // flat.element_size())
    words = (functional.pad(flat, (0, short)) if short else flat).view(torch.int64)
    blocks, rest = divmod(words.numel(), _BLOCK)
    weights, by_block = _weights(words.device), _weights(words.device, blocks + 1)
    if words.is_cuda:
        whole = words[: blocks * _BLOCK].view(blocks, _BLOCK).split(_BLOCKS_AT_ONCE)
        tail = (words[blocks * _BLOCK :] * weights[:rest]).sum(0, True)
        return (torch.cat([*((some * weights).sum(1) for some in whole), tail]) * by_block).sum()
    values = words.numpy()
    sums = np.einsum("ij,j->i", values[: blocks * _BLOCK].reshape(blocks, _BLOCK), weights)
    tail = int(np.dot(values[blocks * _BLOCK :], weights[:rest]))
    return int(np.dot(sums, by_block[:-1])) + tail * int(by_block[-1])


@lru_cache
def _weights(device: torch.device, count: int = _BLOCK) -> Any:
    """Odd pseudorandom weights, as a tensor on a GPU or as an array on a CPU."""
    mixed = torch.arange(1, count + 1, device=device) * _STRIDE
    mixed = (mixed ^ (mixed >> 29)) * _STRIDE | 1
    return mixed if mixed.is_cuda else mixed.numpy()
