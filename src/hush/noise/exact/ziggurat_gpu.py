"""Exact noise on a GPU: launches of the kernels, and what they leave to exact arithmetic.

One kernel makes random words, proposes and rounds all numbers, and lists the half per cent that need a
height, a place in the tail or more bits; another resolves these, from blocks of the stream that are each
number's own. What double precision cannot decide (about one number in 10^10) is left to
`exact_draw.exact_sum`, which reads the same words.
"""

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hush.core.randomness import Stream
from hush.noise.exact.exact_draw import SIZE, WORDS, Words, exact_sum, reserve
from hush.noise.exact.layers import PLACE_BITS, layers

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

GROUP = 16
"""Programs that share a list, which one program resolves: about 100 numbers."""
_PART = 1 << 25
"""Numbers of one launch: of those of two, 4 bytes each are kept beside them."""
_LOW = PLACE_BITS - 31
"""Bits of a place that are in the lower half of its word."""
_COMPILED: dict[tuple[Any, "dtype", "device"], Any] = {}


def add_noise(location: "Tensor", beta: float, scale: float, step: float, source: Stream) -> "Tensor":
    """Replace a contiguous tensor by its rounded sum with noise, each number exactly.

    Args:
        location: Another type than single or double precision is rounded once more to that type.
        beta: Exponent of the law.
        scale: Scale of the noise.
        step: Spacing of the grid.
        source: Stream of the words.
    """
    import torch

    def decide(
        part: "Tensor", total: "Tensor", words: Words, counts: "Tensor", listed: "Tensor"
    ) -> None:
        if int(counts[0]):  # waits: what is undecided has no noise yet
            for index in sorted(-1 - row for row in rows(counts, listed) if row < 0):
                total[index] = exact_sum(float(total[index]), beta, scale, step, words, index)
        if total is not part:
            part.copy_(total)

    launched = None
    for part in location.view(-1).split(_PART):
        total = part if part.dtype in (torch.float32, torch.float64) else part.double()
        words = reserve(len(total), source)
        with torch.cuda.device(total.device):
            queued = part, total, words, *launch(total, beta, scale, step, words)
        if launched is not None:  # the GPU is at the next part meanwhile
            decide(*launched)
        launched = queued
    if launched is not None:
        decide(*launched)
    return location


def launch(
    location: "Tensor", beta: float, scale: float, step: float, words: Words
) -> "tuple[Tensor, Tensor]":
    """Replace a flat tensor by its rounded sum with noise, where double precision decides.

    Returns:
        Counts, of which the first is of numbers that are left as they were; and lists for `rows`.
    """
    import torch

    from hush.core.chacha_kernel import secret
    from hush.noise.exact import ziggurat_kernel

    count, where = len(location), location.device
    programs = -(-count // (WORDS * SIZE))
    groups = -(-programs // GROUP)
    counts = torch.zeros(1 + groups, dtype=torch.int32, device=where)
    listed = torch.empty(groups * GROUP * WORDS * SIZE, dtype=torch.int32, device=where)
    key = words.source.key
    arguments = (
        *(location, counts, listed, *_law(beta, where), count),
        *(_bits(step), _bits(scale / step)),
        *(*secret(key, words.proposals), *secret(key, words.attempts)[8:]),
    )
    _launch(ziggurat_kernel.propose, programs, arguments)
    _launch(ziggurat_kernel.resolve_listed, groups, arguments)
    return counts, listed


def _launch(kernel: Any, programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel of which nothing of an argument but its type is compiled in.

    So it need not be looked for again, which takes the host longer than the launch.
    """
    variant = kernel, arguments[0].dtype, arguments[0].device
    compiled = _COMPILED.get(variant)
    if compiled is None:
        _COMPILED[variant] = kernel[(programs,)](*arguments)
    else:
        compiled[programs, 1, 1](*arguments)


def rows(counts: "Tensor", listed: "Tensor") -> list[int]:
    """Numbers that one word did not decide, by their index; of one that is left, -1 - index."""
    groups = listed.view(-1, GROUP * WORDS * SIZE).tolist()
    return [row for many, group in zip(counts[1:].tolist(), groups, strict=True) for row in group[:many]]


@lru_cache(maxsize=64)
def _law(beta: float, where: "device") -> "tuple[Tensor, Tensor]":
    """Tables of a law on a device.

    Returns:
        For each layer a bound: places whose highest 31 bits are below it are under the curve as a whole;
        and constants, the width of places by layer, heights and strips, one after the other.
    """
    import torch

    law = layers(beta)
    # a place whose highest bits are m ends below (m + 1) 2**5 cells: below the limit if m < bound
    bounds = np.maximum(np.ceil(law.limits / (law.cells * 2.0**_LOW)) - 1, 0)
    tail = [law.strip * 2.0**-law.tail_bits, 2.0**law.tail_bits - 1]
    constants = np.array([law.widest, beta, law.edge, *tail, 0, 0, 0])
    table = np.concatenate([constants, law.cells, law.rounded_heights, law.strips])
    return torch.from_numpy(bounds.astype(np.int32)).to(where), torch.from_numpy(table).to(where)


def _bits(value: float) -> int:
    """The bits of a double, as an integer: Triton passes a Python float in single precision."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
