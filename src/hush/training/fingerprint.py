"""A short name for a released update, computed where the tensors are."""

from collections.abc import Iterable

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants (golden ratio, and one from splitmix64), written as signed integers.
_STRIDE = -7046029254386353131
_SPREAD = -4658895280553007687


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A 64-bit hash of the tensors' bits: equal releases have equal names.

    Integer arithmetic wraps and is the same in any order, so the name does not depend on how a
    device adds. It guards against accidents, not against forgery.
    """
    total = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()]).to(torch.int64)
        index = torch.arange(1, bits.numel() + 1, device=bits.device)
        mixed = (bits ^ (index * _STRIDE)) * _SPREAD
        mixed = (mixed ^ (mixed >> 29)) * _STRIDE
        total = (total * 31 + int(mixed.sum())) % 2**64
    return f"{total:016x}"
