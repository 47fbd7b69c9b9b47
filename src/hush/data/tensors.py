"""From numpy to torch, at the very end: the readers themselves need no torch."""

from typing import TYPE_CHECKING

from hush.data.dataset import Dataset

if TYPE_CHECKING:
    from torch import Tensor


def tensors(dataset: Dataset) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """The arrays x_train, y_train, x_test, y_test as tensors that share their memory."""
    import torch

    return (
        torch.from_numpy(dataset.x_train),
        torch.from_numpy(dataset.y_train),
        torch.from_numpy(dataset.x_test),
        torch.from_numpy(dataset.y_test),
    )
