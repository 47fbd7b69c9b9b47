"""ChaCha20 keystream on a GPU, in Triton: loaded only where there is one."""

from typing import TYPE_CHECKING

import numpy as np
import triton
from triton import language as tl

if TYPE_CHECKING:
    from torch import Tensor, device

_BLOCKS = 128
_BYTES = 64


def keystream(key: bytes, nonce: int, words: int, where: "device") -> "Tensor":
    """`words` 64-bit words of the stream of RFC 8439, block counter from 0, as integers."""
    import torch

    secret = np.frombuffer(key + nonce.to_bytes(12, "little"), dtype="<i4").copy()
    blocks = triton.cdiv(8 * words, _BYTES)
    out = torch.empty(16 * blocks, dtype=torch.int32, device=where)
    grid = (triton.cdiv(blocks, _BLOCKS),)
    with torch.cuda.device(where):
        _kernel[grid](torch.from_numpy(secret).to(where), out, blocks, _BLOCKS)
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
def _kernel(secret, out, blocks, size: tl.constexpr):
    block = tl.program_id(0) * size + tl.arange(0, size)
    zero = (block * 0).to(tl.uint32)
    i0, i1, i2, i3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    i4 = zero + tl.load(secret).to(tl.uint32, bitcast=True)
    i5 = zero + tl.load(secret + 1).to(tl.uint32, bitcast=True)
    i6 = zero + tl.load(secret + 2).to(tl.uint32, bitcast=True)
    i7 = zero + tl.load(secret + 3).to(tl.uint32, bitcast=True)
    i8 = zero + tl.load(secret + 4).to(tl.uint32, bitcast=True)
    i9 = zero + tl.load(secret + 5).to(tl.uint32, bitcast=True)
    i10 = zero + tl.load(secret + 6).to(tl.uint32, bitcast=True)
    i11 = zero + tl.load(secret + 7).to(tl.uint32, bitcast=True)
    i12 = block.to(tl.uint32)
    i13 = zero + tl.load(secret + 8).to(tl.uint32, bitcast=True)
    i14 = zero + tl.load(secret + 9).to(tl.uint32, bitcast=True)
    i15 = zero + tl.load(secret + 10).to(tl.uint32, bitcast=True)
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
    inside = block < blocks
    place = out + block.to(tl.int64) * 16
    tl.store(place, (x0 + i0).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 1, (x1 + i1).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 2, (x2 + i2).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 3, (x3 + i3).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 4, (x4 + i4).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 5, (x5 + i5).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 6, (x6 + i6).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 7, (x7 + i7).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 8, (x8 + i8).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 9, (x9 + i9).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 10, (x10 + i10).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 11, (x11 + i11).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 12, (x12 + i12).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 13, (x13 + i13).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 14, (x14 + i14).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 15, (x15 + i15).to(tl.int32, bitcast=True), mask=inside)
