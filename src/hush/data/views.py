"""Augmented views of an image, over which a per-sample gradient is averaged before clipping."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hush.core.value import check_count

if TYPE_CHECKING:
    import torch


def flips_and_shifts(count: int, *, shift: int = 4) -> "Callable[[torch.Tensor], torch.Tensor]":
    """A function from an image to random views of it, for `PrivateStep(..., views=)`.

    One record, however many views, has one gradient.

    Args:
        count: views of an image.
        shift: largest shift in pixels, either way; views are mirrored half of the time.

    Returns:
        A function from (channels, height, width) to (count, channels, height, width).
    """
    count = check_count("count", count, "views of a record are averaged", at_least=1)
    shift = check_count("shift", shift, "it is a number of pixels")

    def views(image: "torch.Tensor") -> "torch.Tensor":
        import torch

        _, height, width = image.shape
        padded = torch.nn.functional.pad(image, [shift] * 4)
        place = torch.randint(0, 2 * shift + 1, (2, count, 1), device=image.device)
        rows = place[0] + torch.arange(height, device=image.device)
        columns = place[1] + torch.arange(width, device=image.device)
        shifted = padded[:, rows[:, :, None], columns[:, None, :]].movedim(1, 0)
        mirrored = torch.rand(count, 1, 1, 1, device=image.device) < 0.5
        return torch.where(mirrored, shifted.flip(-1), shifted)

    views.__qualname__ = (
        f"flips_and_shifts({count}, shift={shift})"  # identifies the views of a resumed run
    )
    return views
