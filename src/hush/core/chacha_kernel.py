"""ChaCha20 keystream on a GPU, in Triton; imported only if there is a GPU."""

from typing import TYPE_CHECKING

import numpy as np
import triton
from triton import language as tl

if TYPE_CHECKING:
    from torch import Tensor, device

_BLOCKS = 128
_BYTES = 64
SECRET = ("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "n0", "n1", "n2")
"""Kernel arguments for the key and nonce, which must not be compiled into the kernel."""


def secret(key: bytes, nonce: int) -> tuple[int, ...]:
    """Key and nonce as scalar kernel arguments: copying a tensor would synchronise."""
    return tuple(np.frombuffer(key + nonce.to_bytes(12, "little"), dtype="<i4").tolist())


def keystream(key: bytes, nonce: int, words: int, where: "device") -> "Tensor":
    """First `words` 64-bit words of the RFC 8439 stream for a nonce, as integers."""
    import torch

    programs = triton.cdiv(8 * words, _BYTES * _BLOCKS)
    out = torch.empty(programs * _BLOCKS * 16, dtype=torch.int32, device=where)
    with torch.cuda.device(where):
        _kernel[(programs,)](out, *secret(key, nonce), _BLOCKS)
    return out.view(torch.int64)[:words]


@triton.jit
def _rotate(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotate(d ^ a, 16)
    c += d
    b = _rotate(b ^ c, 12)
    a += b
    d = _rotate(d ^ a, 8)
    c += d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def chacha20(counter, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2):
    """Sixteen 32-bit words of each block with the given counters."""
    i12 = counter.to(tl.uint32)
    zero = i12 * 0
    i0, i1, i2, i3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    i4, i5 = zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True)
    i6, i7 = zero + k2.to(tl.uint32, bitcast=True), zero + k3.to(tl.uint32, bitcast=True)
    i8, i9 = zero + k4.to(tl.uint32, bitcast=True), zero + k5.to(tl.uint32, bitcast=True)
    i10, i11 = zero + k6.to(tl.uint32, bitcast=True), zero + k7.to(tl.uint32, bitcast=True)
    i13, i14 = zero + n0.to(tl.uint32, bitcast=True), zero + n1.to(tl.uint32, bitcast=True)
    i15 = zero + n2.to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = i0, i1, i2, i3, i4, i5, i6, i7
    x8, x9, x10, x11, x12, x13, x14, x15 = i8, i9, i10, i11, i12, i13, i14, i15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + i0, x1 + i1, x2 + i2, x3 + i3
    x4, x5, x6, x7 = x4 + i4, x5 + i5, x6 + i6, x7 + i7
    x8, x9, x10, x11, x12, x13 = x8 + i8, x9 + i9, x10 + i10, x11 + i11, x12 + i12, x13 + i13
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14 + i14, x15 + i15


@triton.jit(do_not_specialize=list(SECRET))
def _kernel(out, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, size: tl.constexpr):
    block = tl.program_id(0) * size + tl.arange(0, size)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(
        block, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2
    )
    # interleave halves, then quarters, ..., so each thread writes its block contiguously
    even = _interleaved(x0, x4, x8, x12, x2, x6, x10, x14)
    odd = _interleaved(x1, x5, x9, x13, x3, x7, x11, x15)
    words = tl.reshape(tl.join(even, odd), (16 * size,)).to(tl.int32, bitcast=True)
    place = tl.program_id(0).to(tl.int64) * (16 * size) + tl.arange(0, 16 * size)
    tl.store(out + place, words)


@triton.jit
def _interleaved(a0, a4, a8, a12, a2, a6, a10, a14):
    """Eight words of a block in the order 0, 2, ..., 14, along three new dimensions."""
    zero, two = tl.join(tl.join(a0, a8), tl.join(a4, a12)), tl.join(tl.join(a2, a10), tl.join(a6, a14))
    return tl.join(zero, two)
