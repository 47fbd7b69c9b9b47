"""Fingerprint of tensors, which names releases and compares ranks."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 4096
_BLOCKS_AT_ONCE = 2**14
"""Blocks hashed at once on a GPU."""
_KEPT_WEIGHTS = 2**22
"""Words up to which a GPU keeps their weights: fewer launches than block by block."""
_STRIDE = -7046029254386353131
"""An odd 64-bit constant (the golden ratio), as a signed integer."""


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """64-bit hash of the tensors' bits.

    Integer arithmetic wraps and does not depend on the order of additions, so all devices agree. The
    hash detects accidents, not forgery.
    """
    total = 0
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    hashes = [_hash(tensor) for tensor in flat]
    parts = torch.stack(hashes).tolist() if len(hashes) > 1 else map(int, hashes)
    for tensor, part in zip(flat, parts, strict=True):
        total = (total * _STRIDE + part + tensor.numel() + 1) % 2**64
    return f"{total:016x}"


def _hash(flat: Tensor) -> Tensor:
    """Sum of the 64-bit words, each times the weight of its place."""
    short = -flat.numel() % (8 // flat.element_size())
    words = (functional.pad(flat, (0, short)) if short else flat).view(torch.int64)
    if words.is_cuda and len(words) <= _KEPT_WEIGHTS:
        return (words * _place_weights(words.device, len(words))).sum()
    if not words.is_cuda and len(words) < _BLOCK:
        place, block = _weights(words.device).numpy(), _weights(words.device, 1).numpy()
        return torch.from_numpy(np.dot(words.numpy(), place[: len(words)]) * block)[0]
    blocks, rest = divmod(len(words), _BLOCK)
    whole = words[: blocks * _BLOCK].view(blocks, _BLOCK)
    weights = _weights(words.device)
    tail = words[blocks * _BLOCK :] * weights[:rest]
    sums = torch.cat([_block_hashes(whole, weights), tail.sum(0, True)])
    return (sums * _weights(words.device, blocks + 1)).sum()


def _block_hashes(words: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the words of each block."""
    if words.is_cuda:
        return torch.cat([(some * weights).sum(1) for some in words.split(_BLOCKS_AT_ONCE)])
    return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), weights.numpy()))


@lru_cache(maxsize=2)
def _place_weights(device: torch.device, count: int) -> Tensor:
    """Weights of all words: weight of the place in a block times weight of the block."""
    place = torch.arange(count, device=device)
    blocks = _weights(device, count // _BLOCK + 1)
    return _weights(device)[place % _BLOCK] * blocks[place // _BLOCK]


@lru_cache
def _weights(device: torch.device, count: int = _BLOCK) -> Tensor:
    return _mixed(torch.arange(1, count + 1, device=device))


def _mixed(index: Tensor) -> Tensor:
    """Odd pseudorandom number for each index."""
    mixed = index * _STRIDE
    return (mixed ^ (mixed >> 29)) * _STRIDE | 1
