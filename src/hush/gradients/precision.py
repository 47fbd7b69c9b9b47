"""Work on gradients without what would round it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Without autograd, and without what would round sums: autocast and TensorFloat-32."""
    with torch.no_grad(), without_autocast(device):
        yield


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Without autocast and TensorFloat-32."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        _set_rounding((False, False))
        try:
            yield
        finally:
            _set_rounding(before)


def _set_rounding(rounded: tuple[bool, bool]) -> None:
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = rounded
