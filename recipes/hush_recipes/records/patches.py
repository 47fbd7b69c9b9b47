"""Responses of an image's patches to whitened patches of drawn images, rectified and averaged by place.

As in Coates, Lee and Ng (2011), without learning from any record: the covariance that patches are
whitened by, and those that others are compared with, are of images that a formula draws. Every image is
mapped by itself.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_OF_EACH = 10
"""Patches of a drawn image that are looked at."""
_FLAT, _SOFT = 0.3, 10 / 255
"""Contrast below which a drawn patch is left out, and what is added to that of every patch."""
_RIDGE = 0.05
"""Added to the variances of patches, as a share of their mean."""
_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Which patches are compared, and where responses are averaged."""

    count: int = 768
    """Drawn patches; each gives two features a place, by the sign of the response."""
    side: int = 6
    grid: int = 2
    """Places along either axis."""
    threshold: float = 1.0
    """What a response must exceed, in its standard deviations over drawn images."""
    seed: int = 0
    mirrored: bool = True
    """Whether features are means over an image and its mirror image."""

    def fit(self, drawn: Tensor) -> "PatchResponses":
        """The map to features, from drawn images N x channels x side x side."""
        source = torch.Generator().manual_seed(self.seed)
        chosen = []
        for images in drawn.split(500):
            rows = self.normalised(images)
            picked = torch.randint(rows.shape[1], (len(rows), _OF_EACH), generator=source)
            chosen.append(rows.gather(1, picked[..., None].expand(-1, -1, rows.shape[2])).flatten(0, 1))
        patches = torch.cat(chosen)
        patches = patches[torch.linalg.vector_norm(patches, dim=1) > _FLAT * self.side]
        variances, directions = torch.linalg.eigh(torch.cov(patches.T).double())
        scales = (variances + _RIDGE * variances.mean()) ** -0.5
        whitening = ((directions * scales) @ directions.T).float()
        mean = patches.mean(0)
        order = torch.randperm(len(patches), generator=source)[: self.count]
        compared = functional.normalize((patches[order] - mean) @ whitening)
        filters = (compared @ whitening).T.contiguous()
        offset = -(mean @ filters)
        deviation = float((self.normalised(drawn[:100]) @ filters + offset).std())
        least = self.threshold * deviation
        return PatchResponses(patches=self, filters=filters, offset=offset, least=least)

    def normalised(self, images: Tensor) -> Tensor:
        """Every patch of every image without its mean, over its contrast: N x places x numbers."""
        rows = functional.unfold(images, self.side).mT
        rows = rows - rows.mean(2, keepdim=True)
        contrast = torch.linalg.vector_norm(rows, dim=2, keepdim=True) / self.side
        normalised: Tensor = rows / (contrast + _SOFT * images.shape[1] ** 0.5)
        return normalised


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchResponses:
    """The map from images to features, N x 2 count x grid x grid."""

    patches: Patches
    filters: Tensor
    offset: Tensor
    least: float

    def __call__(self, images: Tensor) -> Tensor:
        return torch.cat([self._either_way(some) for some in images.split(_AT_ONCE)])

    def digest(self) -> str:
        """Tells filters apart, which the images that they are drawn from decide beside the settings."""
        return hashlib.sha256(self.filters.numpy().tobytes()).hexdigest()[:16]

    def _either_way(self, images: Tensor) -> Tensor:
        if not self.patches.mirrored:
            return self._responses(images)
        return (self._responses(images) + self._responses(images.flip(3))) / 2

    @torch.inference_mode()
    def _responses(self, images: Tensor) -> Tensor:
        responses = self.patches.normalised(images) @ self.filters
        responses += self.offset
        # as a product: torch's pooling takes longer than the responses
        average = self._average(images.shape[2] - self.patches.side + 1)
        above = average @ (responses - self.least).clamp_(min=0)
        below = average @ responses.neg_().sub_(self.least).clamp_(min=0)
        features: Tensor = torch.cat([above, below], 2).mT.unflatten(2, (self.patches.grid, -1))
        return features

    def _average(self, side: int) -> Tensor:
        """Means over each place of the grid: grid^2 x side^2."""
        one_hot = torch.eye(side**2).unflatten(1, (side, side))
        return functional.adaptive_avg_pool2d(one_hot, self.patches.grid).flatten(1).T
