"""Descriptions of tensors by which a GPU copies tiles of them by itself: loaded only where there is one.

What lies outside of the tensor is zero in a tile.
"""

from typing import TYPE_CHECKING

from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 16
"""Bytes of which addresses of rows have to be multiples."""


def describe(factor: "Tensor", positions: int, entries: int) -> TensorDescriptor:
    """A factor, (records, positions, entries), for tiles of one record, so many positions and entries.

    It is copied if its rows are not aligned in memory.
    """
    records, length, width = factor.shape
    pitch = width + -width % (_ALIGNMENT // factor.element_size())
    if pitch != width or factor.data_ptr() % _ALIGNMENT or not factor.is_contiguous():
        rows = factor.new_empty(records, length, pitch)
        rows[:, :, :width] = factor
        factor = rows
    return TensorDescriptor(
        factor, [records, length, width], [length * pitch, pitch, 1], [1, positions, entries]
    )
